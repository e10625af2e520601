#!/usr/bin/env bash
# Makes .venv-peers: DeepSpeed beside the very torch that `make` installed, so that both sides run the same kernels.
# DeepSpeed compiles extensions at its first start (minutes, once); they stay in .venv-peers/extensions.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
"$python" -m venv .venv-peers
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
own=$(.venv-peers/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$packages" > "$own/torch_of_zrun.pth"
.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check ninja setuptools deepspeed==0.19.8
.venv-peers/bin/python -c 'import deepspeed, torch; print(f"deepspeed {deepspeed.__version__} with torch {torch.__version__}")'

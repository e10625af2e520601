#!/usr/bin/env bash
# Trainers that `make test` does not have: TRL, and transformers 4.57. In an environment of their own, made once.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=.venv-trainers
if [[ ! -e $venv/.ready || $0 -nt $venv/.ready ]]; then
    "${PYTHON:-python3}" -m venv "$venv"
    sed 's/^transformers==.*/transformers==4.57.6/' constraints.txt > "$venv/constraints.txt"
    "$venv/bin/python" -m pip install --quiet -c "$venv/constraints.txt" torch
    "$venv/bin/python" -m pip install --quiet -c "$venv/constraints.txt" \
        -e . transformers==4.57.6 accelerate peft trl==1.16.0 datasets pytest
    touch "$venv/.ready"
fi
# Not test_habits.py: transformers 4.57 itself cannot go on from a checkpoint on the CPU without DeepSpeed.
"$venv/bin/python" -m pytest -q tests/integrations/test_trainer.py tests/integrations/trl_checks.py "$@"

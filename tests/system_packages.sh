#!/usr/bin/env bash
# Tests of many hosts give each host a network namespace and an sshd of its own. This installs the Debian packages for
# that where they are missing and may be installed; elsewhere it does nothing, and those tests say what they lack.
set -euo pipefail

missing=()
PATH="$PATH:/usr/sbin:/sbin"
command -v ip >/dev/null || missing+=(iproute2)
command -v sshd >/dev/null || missing+=(openssh-server)
command -v fish >/dev/null || missing+=(fish)
command -v tcsh >/dev/null || missing+=(tcsh)

if [ ${#missing[@]} -eq 0 ] || [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    exit 0
fi

echo "installing ${missing[*]}"
log="$(mktemp)"
trap 'rm -f "$log"' EXIT
# Runlevel 1 keeps the packages from starting a server on this machine.
export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
if ! { apt-get update && apt-get install -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
    tail -n 20 "$log"
    echo "could not install ${missing[*]}; going on without" >&2
fi

#!/usr/bin/env bash
# Makes .venv-verl, in which verl runs beside this project on a CPU, or does nothing when it is up to date.
# It holds the packages of requirements/verl-cpu.txt and sees those of .venv; about 60 MB.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
own=${RSTAR2_VENV:-.venv} venv=.venv-verl home=.
log=$PWD/.setup.verl.log
. scripts/install/steps.sh

if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
  fail "this machine has GPUs: write verl's side by --export DIR, and run it in verl's own environment (requirements/verl.txt)"
fi
project=$("$own/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
want=$({ cat requirements/verl-cpu.txt; echo "$project"; } | sha256sum | cut -c1-16)
stamp=$venv/.rstar2-installed
[ "$(cat "$stamp" 2>/dev/null)" != "$want" ] || exit 0
exec 9> .setup.verl.lock
flock -w 900 9 || fail "another setup holds $PWD/.setup.verl.lock"
[ "$(cat "$stamp" 2>/dev/null)" != "$want" ] || exit 0
: > "$log"
find_uv
use_pip_settings
make_venv "$own/bin/python"
echo "$project" > "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/rstar2_project.pth"
step "verl and what it needs beside the project's packages" uv_pip --no-deps -r requirements/verl-cpu.txt
echo "$want" > "$stamp"

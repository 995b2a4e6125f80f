#!/usr/bin/env bash
# Makes .venv from the project's pinned files, or does nothing when it is up to date.
#   scripts/setup_env.sh [--dev]      --dev adds what the tests need
# The order matters: torch first, so that nothing else picks another build of it; then packages that resolve
# normally under constraints; last the ones whose own pins would drag in CUDA builds, without dependencies.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."

fail() { echo "setup: $*" >&2; exit 1; }

files=(requirements/constraints.txt requirements/base.txt requirements/no-deps.txt)
extras=""
# RSTAR2_GPU=1 asks for the GPU packages where none is visible yet: while a container image is built.
if [ -n "${RSTAR2_GPU:-}" ] || { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; }; then
  extras="gpu"
  files+=(requirements/gpu.txt)
fi
want=$(cat "${files[@]}" pyproject.toml | sha256sum | cut -c1-16)
want_dev=$(cat requirements/dev.txt requirements/loggers.txt | sha256sum | cut -c1-16)
stamp=.venv/.rstar2-installed
stamp_dev=.venv/.rstar2-installed-dev
dev=""
[ "${1:-}" = "--dev" ] && dev=1

up_to_date() { [ -x .venv/bin/python ] && [ "$(cat "$1" 2>/dev/null)" = "$2" ]; }
if up_to_date "$stamp" "$want" && { [ -z "$dev" ] || up_to_date "$stamp_dev" "$want_dev"; }; then exit 0; fi

# One setup at a time: two runs started together would tear each other's environment apart.
exec 9>.setup.lock
flock -w 1800 9 || fail "another setup has held .setup.lock for 30 minutes; remove it if no setup is running"

python=""
for candidate in python3.11 python3 python; do
  if command -v "$candidate" >/dev/null 2>&1 &&
    [ "$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "3.11" ]; then
    python=$candidate
    break
  fi
done
[ -n "$python" ] || fail "Python 3.11 not found (python3.11, python3). Debian 12: apt-get install python3 python3-venv"

free_mb=$(df -Pm . | awk 'NR==2 {print $4}')
[ "$free_mb" -ge 4000 ] || [ -x .venv/bin/python ] || fail "the environment needs 4 GB, $(pwd) has $free_mb MB free"

log=.setup.log
: > "$log"
step() {
  local label=$1; shift
  echo "setup: $label"
  "$@" >> "$log" 2>&1 || { tail -n 25 "$log" >&2; fail "$label failed; the whole output is in $(pwd)/$log"; }
}
if ! up_to_date "$stamp" "$want"; then
  if [ ! -x .venv/bin/python ]; then
    echo "setup: making .venv with $("$python" --version)"
    "$python" -m venv .venv >> "$log" 2>&1 || { rm -rf .venv; tail -n 8 "$log" >&2
      fail "could not make a virtual environment. Debian 12: apt-get install python3-venv"; }
  fi
  pip=(.venv/bin/python -m pip install --disable-pip-version-check --no-input)
  step "torch (1 of 4)" "${pip[@]}" -c requirements/constraints.txt torch
  step "run-time packages (2 of 4, the longest)" "${pip[@]}" -c requirements/constraints.txt -r requirements/base.txt
  step "sglang, rlinf and their like (3 of 4)" "${pip[@]}" --no-deps -r requirements/no-deps.txt
  [ -z "$extras" ] || step "GPU packages" "${pip[@]}" -c requirements/constraints.txt -r requirements/gpu.txt
  step "rstar2_megatron itself (4 of 4)" "${pip[@]}" --no-deps --no-build-isolation -e .
  echo "$want" > "$stamp"
fi
if [ -n "$dev" ] && ! up_to_date "$stamp_dev" "$want_dev"; then
  step "test packages" .venv/bin/python -m pip install --disable-pip-version-check --no-input \
    -c requirements/constraints.txt -r requirements/dev.txt
  step "wandb and swanlab" .venv/bin/python -m pip install --disable-pip-version-check --no-input \
    --no-deps -r requirements/loggers.txt
  echo "$want_dev" > "$stamp_dev"
fi

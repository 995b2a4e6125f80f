#!/usr/bin/env bash
# verl beside this project: writes verl's side of a configuration, runs both on a CPU, draws the comparison.
#   bash compare_with_verl.sh NAME [key=value ...] [--arms verl grpo roc-paper roc-released] [--seeds 0 1 2] [--out DIR]
#   bash compare_with_verl.sh NAME [key=value ...] --export DIR        verl's command and files only, for its own GPUs
set -euo pipefail
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../../.." && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false
bash "$root/scripts/setup_env.sh"
case " $* " in
  *" --export"* | *" --help "* | *" -h "*) ;;
  *) bash "$root/scripts/setup_verl.sh" ;;
esac
export RSTAR2_CALLED_FROM=$PWD # a relative path is the user's
cd "$root"                     # where a run keeps the cold start's model
exec "${RSTAR2_VENV:-.venv}/bin/python" -u examples/agent/rstar2/compare_with_verl.py "$@"

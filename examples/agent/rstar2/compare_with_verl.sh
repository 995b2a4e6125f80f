#!/usr/bin/env bash
# Writes verl's side of a configuration, for a run of verl beside one of this project.
#   bash compare_with_verl.sh NAME [key=value ...] --export DIR
set -euo pipefail
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../../.." && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "$root/.venv/bin/python" "$root/examples/agent/rstar2/compare_with_verl.py" "$@"

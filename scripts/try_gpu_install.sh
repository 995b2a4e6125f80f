#!/usr/bin/env bash
# Does on a machine without a GPU what set-up does on one with: installs requirements/gpu.lock with the CUDA torch of the
# registry, builds TransformerEngine for one architecture, imports everything with a stub of the driver, runs tests/install there
# and writes what it saw to DIR/report.json.
#   bash scripts/try_gpu_install.sh DIR        25 GB; a second run continues where the first one stopped
#   MAX_JOBS=2 NVTE_CUDA_ARCHS=90              compilers at a time (1), architecture (90)
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
[ $# -eq 1 ] || { sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; exit 2; }
dir=$(readlink -m "$1")
mkdir -p "$dir"

# A machine's own wheel folder may hold a CPU build of torch.
unset PIP_FIND_LINKS PIP_EXTRA_INDEX_URL
export PIP_CONFIG_FILE=/dev/null
export RSTAR2_GPU=1 RSTAR2_VENV=$dir/venv NVTE_CUDA_ARCHS=${NVTE_CUDA_ARCHS:-90} MAX_JOBS=${MAX_JOBS:-1}
nice -n 19 bash scripts/setup_env.sh --dev

bash scripts/install/stub_libcuda.sh "$RSTAR2_VENV" "$dir/stub"
. scripts/install/gpu_environment.sh "$RSTAR2_VENV"
export LD_LIBRARY_PATH=$dir/stub${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec nice -n 19 "$RSTAR2_VENV/bin/python" -m benchmarks.gpu_install "$dir"

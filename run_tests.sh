#!/usr/bin/env bash
# Sets up what is missing, then lint, type check, import contracts (pyproject.toml) and tests. Arguments go to pytest. Without
# any, tests marked `long` (whole runs of minutes that no other test needs) are left out; `--all`, as CI has it, runs them too.
# RSTAR2_AGAIN=1: tests that failed run once more, alone, and fail the run only if they fail again.
set -uo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"
if [ $# -eq 0 ]; then set -- -m "not long"; elif [ "$1" = --all ]; then shift; fi
bash scripts/setup_env.sh --dev || exit 1
venv=${RSTAR2_VENV:-.venv}
. scripts/install/gpu_environment.sh "$venv"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false
py=$venv/bin/python
status=0
echo "== ruff";   $py -m ruff check . || status=1
                  $py -m ruff format --check --quiet . || { echo "run: $venv/bin/ruff format ."; status=1; }
echo "== mypy";   $py -m mypy rstar2_megatron benchmarks || status=1
echo "== imports"; $venv/bin/lint-imports --no-logo || status=1
# Each run of the program starts a dozen processes; with PYTHONDONTWRITEBYTECODE set, each would compile the project again.
$py -m compileall -q rstar2_megatron tests
# pytest's 1: tests failed
echo "== pytest"; $py -m pytest "$@"; tests=$?
if [ $tests -eq 1 ] && [ -n "${RSTAR2_AGAIN:-}" ]; then
  echo "== pytest: what failed, once more, alone"; $py -m pytest "$@" --last-failed --last-failed-no-failures=none --maxfail=1; tests=$?
fi
[ $tests -eq 0 ] || status=1
[ $status -eq 0 ] || echo "run_tests.sh: something above failed" >&2
exit $status

#!/usr/bin/env bash
# Sets up what is missing, then lint, format, types and import contracts, then pytest. tests/README.md says what each tier proves.
#   bash run_tests.sh             the default tier: what a change is likely to break
#   bash run_tests.sh --ci        and every test that guards a promise of README or docs/, as CI runs it
#   bash run_tests.sh --release   what takes hours; what has passed is in benchmarks/results/release_tests.json and not run again
#   bash run_tests.sh tests/algorithm -k roc       a part: files are run as with --ci, unless a tier is named
#   --keep-going                  runs pytest although a check before it has failed
set -uo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"
tier="" part="" keep_going="" chosen=()
for argument in "$@"; do
  case $argument in
    --ci | --release) tier=${argument#--} ;;
    --keep-going) keep_going=1 ;;
    *) chosen+=("$argument"); [ ! -e "${argument%%::*}" ] || part=1 ;;
  esac
done
[ -n "$tier" ] || tier=$([ -n "$part" ] && echo ci || echo default)

bash scripts/setup_env.sh --dev || exit 1
venv=${RSTAR2_VENV:-.venv}
. scripts/install/gpu_environment.sh "$venv"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false
py=$venv/bin/python
status=0
check() { # NAME COMMAND...
  echo "== $1"
  "${@:2}" && return
  status=1
  [ -n "$keep_going" ] || { echo "run_tests.sh: $1 failed, so pytest was not run (--keep-going runs it)" >&2; exit 1; }
}
check "ruff" "$py" -m ruff check .
check "format ($py -m ruff format . mends it)" "$py" -m ruff format --check --quiet .
check "mypy" "$py" -m mypy rstar2_megatron benchmarks
check "imports" $venv/bin/lint-imports --no-logo
# Each run of the program starts a dozen processes; with PYTHONDONTWRITEBYTECODE set, each would compile the project again.
"$py" -m compileall -q rstar2_megatron tests
echo "== pytest"
# Two processes, because tests of real parts wait as long as they compute. Tests of hours have the machine for themselves.
processes=(-n 2)
[ "$tier" != release ] || processes=()
"$py" -m pytest --tier "$tier" "${processes[@]}" "${chosen[@]}" || status=1
[ $status -eq 0 ] || echo "run_tests.sh: something above failed" >&2
exit $status

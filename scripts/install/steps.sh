# Sourced by setup_env.sh: how a step runs, what it leaves in the log, which interpreter and pip it uses. Needs `venv` and `log`.

fail() { echo "setup: $*" >&2; exit 1; }

disk_kb() { du -sk "$venv" 2>/dev/null | cut -f1 || true; }

# run_logged LABEL COMMAND...: output to the log; seconds and size to steps.tsv (label, seconds, MB added, exit status).
run_logged() {
  local label=$1 began=$SECONDS before after status=0; shift
  before=$(disk_kb)
  echo "setup: $label"
  printf '\n== %s: %s\n' "$label" "$*" >> "$log"
  "$@" >> "$log" 2>&1 || status=$?
  after=$(disk_kb)
  printf '%s\t%s\t%s\t%s\n' "$label" $((SECONDS - began)) $(((${after:-0} - ${before:-0}) / 1024)) "$status" >> "$venv/.rstar2-steps.tsv"
  return "$status"
}

step() { run_logged "$@" || { tail -n 25 "$log" >&2; fail "$1 failed; the whole output is in $(readlink -f "$log")"; }; }

pip_install() { "$venv/bin/python" -m pip install --disable-pip-version-check --no-input "$@"; }

find_python() {
  local candidate
  for candidate in python3.11 python3 python; do
    if command -v "$candidate" >/dev/null 2>&1 &&
      [ "$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "3.11" ]; then
      echo "$candidate"
      return
    fi
  done
  fail "Python 3.11 not found (python3.11, python3). Debian 12: apt-get install python3 python3-venv; elsewhere \`uv python install 3.11\`, the distribution's python3.11 with venv and headers, or docker/train.Dockerfile"
}

make_venv() {
  [ ! -x "$venv/bin/python" ] || return 0
  echo "setup: making $venv with $("$python" --version)"
  "$python" -m venv "$venv" >> "$log" 2>&1 || { rm -rf "$venv"; tail -n 8 "$log" >&2
    fail "could not make a virtual environment. Debian 12: apt-get install python3-venv"; }
}

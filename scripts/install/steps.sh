# Sourced by setup_env.sh and setup_verl.sh: how a step runs, what it leaves in the log, and uv, which finds or fetches a Python and
# installs. Needs `venv`, `home` and `log`.

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

# Bytecode is compiled at once: else a dozen processes of the first run would each do it.
uv_pip() { "$uv" pip install --python "$venv/bin/python" --compile-bytecode "$@"; }

# at_least VERSION WANTED: dotted numbers
at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; }

# Sets `uv`: the system's, or one that pip puts into a folder beside the environment.
find_uv() {
  local folder=$home/.cache/uv pin cache=${UV_CACHE_DIR:-${XDG_CACHE_HOME:-${HOME:-/}/.cache}/uv}
  mkdir -p "$cache" 2>/dev/null && [ -w "$cache" ] || export UV_CACHE_DIR=$home/.cache/uv-cache # a HOME that cannot be written
  uv=$(command -v uv || true)
  [ -z "$uv" ] || ! at_least "$("$uv" --version | cut -d ' ' -f 2)" 0.8 || return 0
  uv=$folder/bin/uv pin=$(grep -E '^uv==' requirements/constraints.txt)
  [ "$("$uv" --version 2>/dev/null | cut -d ' ' -f 1,2)" != "${pin/==/ }" ] || return 0
  echo "setup: installing $pin into $folder, by pip"
  python3 -m pip install --disable-pip-version-check --no-input --upgrade --target "$folder" "$pin" >> "$log" 2>&1 ||
    { python3 -m venv --clear "$folder" && "$folder/bin/python" -m pip install --no-input "$pin"; } >> "$log" 2>&1 ||
    { tail -n 8 "$log" >&2; fail "no uv, and pip could not install it (above). Without pip: apt-get install python3-venv (Debian, Ubuntu), dnf install python3-pip (Fedora, RHEL). Without a way to the index: PIP_INDEX_URL=MIRROR or HTTPS_PROXY=PROXY. Or install uv yourself"; }
}

# uv reads none of pip's settings. A mirror, a certificate or a folder of wheels that pip was given is meant here too; and of several
# indexes pip takes the best version, uv by itself the first that has the package.
use_pip_settings() {
  local said name key value
  said=$({ python3 -m pip config list || "$home/.cache/uv/bin/python" -m pip config list; } 2>/dev/null || true)
  while read -r name key; do
    value=$(sed -n "s/^[^=]*\.$key='\(.*\)'\$/\1/p" <<< "$said" | head -n 1 | sed 's/\\n/ /g')
    [ $name != UV_FIND_LINKS ] || value=${value// /,}
    [ -z "$value" ] || [ -n "${!name:-}" ] || export "$name=$value"
  done <<< $'UV_DEFAULT_INDEX index-url\nUV_INDEX extra-index-url\nUV_FIND_LINKS find-links\nSSL_CERT_FILE cert'
  export UV_INDEX_STRATEGY=${UV_INDEX_STRATEGY:-unsafe-best-match}
}

# By requires-python of pyproject.toml, from what the machine has (UV_PYTHON names one of it), else fetched.
make_venv() { # make_venv [PYTHON]
  local found; found=$(python3 -c 'import platform; print(platform.python_version())' 2>/dev/null || echo absent)
  [ ! -x "$venv/bin/python" ] || return 0
  rm -rf "$venv"
  "$uv" venv ${1:+--python "$1"} "$venv" >> "$log" 2>&1 || { tail -n 4 "$log" >&2
    fail "Python 3.11, 3.12 or 3.13 is needed, python3 is $found, and uv could not fetch one (above). apt-get install python3 (Debian 12, 13, Ubuntu 24.04) or python3.11 (Ubuntu 22.04), dnf install python3.12 (Fedora, RHEL 9), or a mirror of uv's Pythons: UV_PYTHON_INSTALL_MIRROR=URL"; }
  found=$("$venv/bin/python" --version)
  case $found in
    "Python 3.11."* | "Python 3.12."* | "Python 3.13."*) echo "setup: made $venv with $found" ;;
    *) rm -rf "$venv"; fail "UV_PYTHON names $found; Python 3.11, 3.12 or 3.13 is needed" ;;
  esac
}

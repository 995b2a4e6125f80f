# Sourced by setup_env.sh: TransformerEngine, an optional step after everything else works. Its extension for torch is compiled here,
# against the torch that is installed and with the toolkit of the wheels: minutes on many cores, up to an hour on one.
# The wheel is kept beside the environment (.cache/wheels), so that a new environment of the same torch takes it from there.
#   RSTAR2_TRANSFORMER_ENGINE=0   leaves it out        NVTE_CUDA_ARCHS=90   architectures        MAX_JOBS=4   compilers at a time
# Functions that run_logged calls return on failure by hand: bash ignores `set -e` there.

te_requirements=requirements/transformer-engine.txt
te_state=$venv/.rstar2-transformer-engine # "installed HASH" or "failed HASH": a build that failed is not repeated at every start
te_want=$(cat "$te_requirements" requirements/gpu.lock | sha256sum | cut -c1-16)

te_settled() {
  [ "${RSTAR2_TRANSFORMER_ENGINE:-1}" != 0 ] || return 0
  [ -z "$again" ] || return 1
  case $(cat "$te_state" 2>/dev/null) in
    "installed $te_want") ;;
    "failed $te_want") echo "setup: without TransformerEngine, whose build failed (bash scripts/setup_env.sh --transformer-engine tries again)" ;;
    *) return 1 ;;
  esac
}

setup_transformer_engine() {
  ! te_settled || return 0
  exec 8>&2
  if run_logged "TransformerEngine (optional; minutes on many cores, up to an hour on one)" install_transformer_engine; then
    echo "installed $te_want" > "$te_state"
    return 0
  fi
  echo "failed $te_want" > "$te_state"
  # half of it would be found and not work
  "$uv" pip uninstall -q --python "$venv/bin/python" transformer-engine{,-cu13,-torch} >> "$log" 2>&1 || true
  tail -n 5 "$te_log" >&2 2>/dev/null || tail -n 5 "$log" >&2
  cat >&2 <<END
setup: TransformerEngine is not installed; the whole output is in $(readlink -f "$te_log") and $(readlink -f "$log").
setup: Everything else is: actor.model.transformer_impl=auto (the default) now means megatron-core's local layers with torch's
setup: attention, which train the same model more slowly. Once the cause is gone (memory: MAX_JOBS=2; a g++ that nvcc does not
setup: know; a proxy), bash scripts/setup_env.sh --transformer-engine tries again.
END
}

install_transformer_engine() {
  local folder
  : > "$te_log"
  folder=$(te_wheel_folder) || return 1
  [ -f "$folder/build.json" ] || build_te_wheel "$folder" || return 1
  # All three at once: a run that starts while the last one is compiled finds none of them, not a half.
  grep -vE '^(#|transformer-engine-torch==)' "$te_requirements" > "$venv/.rstar2-te-core.txt" &&
    uv_pip --no-deps --reinstall-package transformer-engine-torch -r "$venv/.rstar2-te-core.txt" \
      "$folder"/transformer_engine_torch-*.whl || return 1
  # without a driver (an image being built) the import finds no libcuda.so.1
  "$venv/bin/python" -c 'import ctypes; ctypes.CDLL("libcuda.so.1")' 2>/dev/null || return 0
  "$venv/bin/python" -c 'import torch, transformer_engine.pytorch' # torch first: it loads cuBLAS
}

te_archs() { # compute capabilities of this machine's GPUs, 90 (H100, H200) where none is visible
  local found
  found=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | tr -d . | sort -u | paste -sd ';' || true)
  echo "${NVTE_CUDA_ARCHS:-${found:-90}}"
}

te_jobs() { # a compiler takes up to 4 GB
  local jobs by_memory
  jobs=$(nproc)
  by_memory=$(awk '/MemAvailable/ {print int($2 / 4000000)}' /proc/meminfo)
  [ "$by_memory" -ge "$jobs" ] || jobs=$by_memory
  [ "$jobs" -ge 1 ] || jobs=1
  echo "${MAX_JOBS:-$jobs}"
}

te_wheel_folder() { # named after all that a wheel depends on; "+" of the torch build included
  local torch
  torch=$("$venv/bin/python" -c 'import importlib.metadata, torch; print(torch.__version__)') || return 1
  echo "$home/.cache/wheels/$(grep -E '^transformer-engine-torch==' "$te_requirements" | sed 's/==/-/')-torch$torch-sm$(te_archs | tr ';' '_')"
}

# Copies a build's output; of each "[12/28]" of ninja it tells descriptor 8, the terminal.
te_progress() {
  local line ready all began=$SECONDS
  while IFS= read -r line; do
    printf '%s\n' "$line"
    [[ $line =~ ^\ *\[([0-9]+)/([0-9]+)\]\  ]] || continue
    ready=${BASH_REMATCH[1]} all=${BASH_REMATCH[2]}
    echo "setup: TransformerEngine: $ready of $all files, about $(((SECONDS - began) * (all - ready) / ready / 60 + 1)) minutes left" >&8
  done
}

build_te_wheel() { # build_te_wheel FOLDER
  local began=$SECONDS archs jobs
  archs=$(te_archs) jobs=$(te_jobs)
  echo "setup: TransformerEngine: compiling for sm_$archs, $jobs files at a time, log in $te_log; meanwhile" \
    "RSTAR2_TRANSFORMER_ENGINE=0 bash run_rstar2.sh ... in another shell trains without it" >&8
  rm -rf "$1" "$1.part"
  # --no-cache-dir: pip's own cache of built wheels does not know which torch a wheel was compiled against
  (
    . scripts/install/gpu_environment.sh "$venv"
    export NVTE_FRAMEWORK=pytorch NVTE_CUDA_ARCHS=$archs MAX_JOBS=$jobs
    TORCH_CUDA_ARCH_LIST=$(sed -E 's/([0-9]+)([0-9])/\1.\2/g' <<< "$archs")
    CUDNN_PATH=$(echo "$(readlink -f "$venv")"/lib/python3.*/site-packages/nvidia/cudnn)
    export TORCH_CUDA_ARCH_LIST CUDNN_PATH
    exec "$venv/bin/python" -m pip wheel --disable-pip-version-check --no-input --no-cache-dir --no-deps \
      ${UV_DEFAULT_INDEX:+--index-url "$UV_DEFAULT_INDEX"} --no-build-isolation -v -w "$1.part" "$(grep -E '^transformer-engine-torch==' "$te_requirements")"
  ) 2>&1 | te_progress >> "$te_log" || return 1
  cp "$te_log" "$1.part/build.log"
  printf '{"seconds": %s, "max_jobs": %s, "cuda_archs": "%s"}\n' $((SECONDS - began)) "$jobs" "$archs" > "$1.part/build.json"
  mv "$1.part" "$1"
}

# Sourced by setup_env.sh: what the machine must have before anything is downloaded. Each answer names the remedy.

# Sets torch_pin, torch_from (words for uv) and needed_mb, and says which build of torch will come. Metadata only.
# Megabytes: of the whole environment, as measured, with room for a run's own files.
choose_torch() {
  local index=${RSTAR2_TORCH_INDEX:-https://download.pytorch.org/whl/cpu} would
  torch_pin=$(grep -E '^torch==' requirements/constraints.txt) torch_from=() needed_mb=3000
  if [ -n "$gpu" ]; then
    has_cuda_torch || torch_from=(--reinstall-package torch) # a CPU build satisfies the same pin
  elif UV_HTTP_TIMEOUT=10 UV_HTTP_RETRIES=0 uv_pip --dry-run --no-deps --default-index "$index" "$torch_pin" >> "$log" 2>&1; then
    torch_from=(--default-index "$index")
  else
    echo "setup: no $torch_pin from $index (RSTAR2_TORCH_INDEX): taking the ordinary index's"
  fi
  would=$(uv_pip --dry-run --no-deps "${torch_from[@]}" "$torch_pin" 2>&1) || { echo "$would" >&2
    fail "no package index gives $torch_pin (above). A mirror: UV_DEFAULT_INDEX=URL or pip's index-url; a proxy: HTTPS_PROXY=URL"; }
  case $gpu$(grep -E '^ [+~] torch==' <<< "$would") in
    1*+cpu) fail "the index gives a build of $torch_pin without CUDA: take its local wheel folder away (pip config list, PIP_FIND_LINKS)" ;;
    1*) needed_mb=20000 ;;
    *+cpu) echo "setup: torch is the CPU build" ;;
    *torch*) needed_mb=7500; echo "setup: torch is the CUDA build, 4 GB larger; it runs without a GPU too" ;;
  esac
}

# uv's cache holds the environment's files by hard links, on another file system once more.
check_disk() {
  local place free_mb have_mb; have_mb=$(($(disk_kb) / 1024))
  for place in "$venv" "$("$uv" cache dir)"; do
    mkdir -p "$place"
    free_mb=$(df -Pm "$place" | awk 'NR==2 {print $4}')
    [ $((free_mb + have_mb)) -ge "$needed_mb" ] ||
      fail "the environment needs $((needed_mb / 1000)) GB, $(readlink -f "$place") has $free_mb MB free; free some, or set RSTAR2_VENV and UV_CACHE_DIR"
  done
}

check_glibc() { # check_glibc WANTED WHAT
  local found; found=$(getconf GNU_LIBC_VERSION 2>/dev/null | awk '{print $2}')
  at_least "${found:-0}" "$1" ||
    fail "$2 need glibc $1 or newer, this system has ${found:-none}: use Debian 12, Ubuntu 22.04 or newer, or docker/train.Dockerfile"
}

check_libseccomp() {
  "$venv/bin/python" -c 'import ctypes; ctypes.CDLL("libseccomp.so.2")' 2>/dev/null ||
    echo "setup: warning: libseccomp.so.2 not found, which the Code Judge's sandbox needs; Debian, Ubuntu: apt-get install libseccomp2" >&2
}

# Triton compiles C when a program runs, flashinfer and sglang compile C++ and CUDA.
check_compilers() {
  local tool header
  for tool in gcc g++; do
    command -v "$tool" >/dev/null || fail "$tool not found; GPU kernels are compiled at run time. Debian, Ubuntu: apt-get install build-essential"
  done
  header=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
  [ -f "$header" ] || { rm -rf "$venv" # the remedy may be another Python
    fail "$header not found; Triton compiles against it at run time. apt-get install python3-dev, or UV_MANAGED_PYTHON=1: a Python of uv has it"; }
}

# The CUDA 13 builds of torch and sglang see no GPU with a driver older than the 580 series, unless a newer libcuda is loaded before
# the driver's: NVIDIA's cuda-compat, for data-centre GPUs.
check_driver() {
  local driver
  driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) || return 0
  if [ -z "$driver" ] || at_least "$driver" 580 || [ "$(cuda_of_driver)" -ge 13000 ]; then return 0; fi
  fail "driver $driver is older than 580, which CUDA 13 needs. Update it; or, with a data-centre GPU, apt-get install cuda-compat-13-0 (NVIDIA's repository) and export LD_LIBRARY_PATH=/usr/local/cuda-13.0/compat on every node; or RSTAR2_GPU=0. Nothing was downloaded"
}

cuda_of_driver() { # the CUDA version that libcuda answers, as 13000 for 13.0; 0 without one
  python3 - 2>/dev/null <<< 'import ctypes; n = ctypes.c_int(); ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(n)); print(n.value)' ||
    echo 0
}

check_system() {
  [ "$(uname -m)" = x86_64 ] || fail "the packages are made for x86_64, this machine is $(uname -m)"
  check_glibc 2.34 "sglang's wheels"
  [ -z "$gpu" ] || check_driver
}

# Sourced by setup_env.sh: what the machine must have before anything is downloaded. Each answer names the remedy.

# at_least VERSION WANTED: dotted numbers
at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; }

check_disk() { # check_disk NEEDED_MB
  local free_mb; free_mb=$(df -Pm "$(dirname "$venv")" | awk 'NR==2 {print $4}')
  [ -x "$venv/bin/python" ] || [ "$free_mb" -ge "$1" ] ||
    fail "the environment needs $(($1 / 1000)) GB, $(readlink -f "$(dirname "$venv")") has $free_mb MB free; free some, or set RSTAR2_VENV"
}

check_glibc() { # check_glibc WANTED WHAT
  local found; found=$(getconf GNU_LIBC_VERSION 2>/dev/null | awk '{print $2}')
  at_least "${found:-0}" "$1" ||
    fail "$2 need glibc $1 or newer, this system has ${found:-none}: use Debian 12, Ubuntu 22.04 or newer, or docker/train.Dockerfile"
}

check_libseccomp() {
  "$python" -c 'import ctypes; ctypes.CDLL("libseccomp.so.2")' 2>/dev/null ||
    echo "setup: warning: libseccomp.so.2 not found, which the Code Judge's sandbox needs; Debian, Ubuntu: apt-get install libseccomp2" >&2
}

# Triton compiles C when a program runs, flashinfer and sglang compile C++ and CUDA.
check_compilers() {
  local tool header
  for tool in gcc g++; do
    command -v "$tool" >/dev/null || fail "$tool not found; GPU kernels are compiled at run time. Debian, Ubuntu: apt-get install build-essential"
  done
  header=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
  [ -f "$header" ] ||
    fail "$header not found; Triton compiles against it at run time. apt-get install python3.11-dev (Debian 12: python3-dev)"
}

# The CUDA 13 builds of torch and sglang need a driver of the 580 series; data-centre GPUs can bridge with cuda-compat.
check_driver() {
  local driver
  driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) || return 0
  [ -z "$driver" ] || at_least "$driver" 580 ||
    echo "setup: warning: driver $driver is older than 580, which CUDA 13 asks for; update it, or install cuda-compat-13-0" >&2
}

check_gpu_prerequisites() {
  [ "$(uname -m)" = x86_64 ] || fail "requirements/gpu.lock is made for x86_64, this machine is $(uname -m)"
  check_glibc 2.34 "sglang's wheels"
  check_compilers
  check_driver
  check_disk 20000
}

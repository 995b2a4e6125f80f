#!/usr/bin/env bash
# Makes a libcuda.so.1 whose functions all answer "no device", enough to import what links to the driver on a machine without one.
#   scripts/install/stub_libcuda.sh VENV DIR      then LD_LIBRARY_PATH=DIR
set -euo pipefail
site=$(echo "$(readlink -f "$1")"/lib/python3.*/site-packages)
mkdir -p "$2"
find "$site"/{sgl_kernel,torch/lib,transformer_engine*,torch_memory_saver*,deep_gemm*,deep_ep*} -name '*.so' 2>/dev/null |
  while read -r library; do nm -D --undefined-only "$library" 2>/dev/null | awk '{print $NF}' | sed 's/@.*//'; done |
  { grep -E '^cu[A-Z]' || true; } | sort -u > "$2/symbols.txt"
{
  echo '#define NO_DEVICE 100'
  while read -r symbol; do echo "int $symbol(void) { return NO_DEVICE; }"; done < "$2/symbols.txt"
} > "$2/libcuda.c"
gcc -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$2/libcuda.so.1" "$2/libcuda.c"

# Sourced by setup_env.sh: the packages of requirements/gpu.lock, which a resolver has already proved to fit together, so that they
# are installed without dependencies.

install_gpu_packages() {
  step "torch for CUDA (1 of 4)" uv_pip --no-deps "${torch_from[@]}" "$torch_pin"
  step "GPU packages (2 of 4, the longest)" uv_pip --no-deps -r requirements/gpu.lock
  step "cuda-tile (3 of 4)" install_cuda_tile
  step "rlinf (4 of 4)" uv_pip --no-deps -r requirements/no-deps.txt
  install_redis
  step "toolkit of the wheels" complete_toolkit
}

has_cuda_torch() { [ -f "$(echo "$venv"/lib/python3.*/site-packages/torch/lib)/libtorch_cuda.so" ]; }

# sglang pins a release candidate that only NVIDIA's index has. Few flashinfer kernels want it (none that this project calls), so
# where that index is out of reach, the final version from the ordinary index is used.
install_cuda_tile() {
  UV_HTTP_TIMEOUT=20 UV_HTTP_RETRIES=1 uv_pip --no-deps -r requirements/cuda-tile.txt && return 0
  echo "https://pypi.nvidia.com gave no cuda-tile: taking the final version"
  uv_pip --no-deps --only-binary cuda-tile cuda-tile==1.6.0
}

# The wheels' toolkit lacks what a linker looks for: lib64, names without a version, and a libcuda to link against where the
# driver's development link is missing. That one is empty and is never loaded: programs ask for libcuda.so.1.
complete_toolkit() {
  local toolkit library; toolkit=$(echo "$venv"/lib/python3.*/site-packages/nvidia/cu13)
  [ -e "$toolkit/lib64" ] || ln -s lib "$toolkit/lib64" || return 1
  for library in "$toolkit"/lib/lib*.so.[0-9]*; do
    [ -e "${library%%.so.*}.so" ] || ln -s "$(basename "$library")" "${library%%.so.*}.so" || return 1
  done
  mkdir -p "$toolkit/lib/stubs" || return 1
  [ -e "$toolkit/lib/stubs/libcuda.so" ] ||
    gcc -shared -Wl,-soname,libcuda.so.1 -o "$toolkit/lib/stubs/libcuda.so" -x c /dev/null
}

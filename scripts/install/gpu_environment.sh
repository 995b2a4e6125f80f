# Sourced: puts the compilers of a GPU environment on PATH. sglang, flashinfer and Triton compile kernels while a program runs: they
# call ninja (in the environment's bin) and nvcc, and look for CUDA_HOME. The wheels of requirements/gpu.lock bring that toolkit.
#   . scripts/install/gpu_environment.sh VENV        does nothing in an environment without GPU packages
# RSTAR2_CUDA_HOME names another toolkit, of CUDA 13.

_site=$(echo "$(readlink -f "$1")"/lib/python3.*/site-packages)
if [ -x "$_site/nvidia/cu13/bin/nvcc" ]; then
  export CUDA_HOME=${RSTAR2_CUDA_HOME:-$_site/nvidia/cu13}
  export CUDA_PATH=$CUDA_HOME
  export PATH=$(readlink -f "$1")/bin:$CUDA_HOME/bin:$PATH
  # cuDNN and NCCL are packages of their own, outside CUDA_HOME.
  export CPATH=$_site/nvidia/cudnn/include:$_site/nvidia/nccl/include:$CUDA_HOME/include${CPATH:+:$CPATH}
  export LIBRARY_PATH=$CUDA_HOME/lib64:$_site/nvidia/cudnn/lib:$_site/nvidia/nccl/lib${LIBRARY_PATH:+:$LIBRARY_PATH}
fi
unset _site

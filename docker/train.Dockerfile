# Training on NVIDIA GPUs (driver of the 580 series or newer, NVIDIA container toolkit). Built from the project's root:
#   docker build -f docker/train.Dockerfile -t rstar2-train .        no GPU is needed; --build-arg NVTE_CUDA_ARCHS="90;100"
# No CUDA image: toolkit, cuDNN and NCCL come with requirements/gpu.lock, and a second cuDNN beside them would mix its libraries.
FROM python:3.11-bookworm
ARG NVTE_CUDA_ARCHS=90
# RSTAR2_GPU: no GPU is visible while an image is built, and the container must find the environment as it was built.
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1 RSTAR2_GPU=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN apt-get update \
 && apt-get install -y --no-install-recommends build-essential redis-server libseccomp2 libibverbs1 ibverbs-providers numactl \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/rstar2
COPY pyproject.toml README.md ./
COPY requirements ./requirements
COPY scripts ./scripts
COPY rstar2_megatron ./rstar2_megatron
RUN bash scripts/setup_env.sh
COPY . .
ENTRYPOINT ["bash", "run_rstar2.sh"]

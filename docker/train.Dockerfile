# Training on NVIDIA GPUs. Built from the project's root on a machine with the NVIDIA container toolkit:
#   docker build -f docker/train.Dockerfile -t rstar2-train .
FROM nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04
ENV DEBIAN_FRONTEND=noninteractive PYTHONUNBUFFERED=1
RUN apt-get update \
 && apt-get install -y --no-install-recommends software-properties-common \
 && add-apt-repository -y ppa:deadsnakes/ppa \
 && apt-get install -y --no-install-recommends \
      python3.11 python3.11-venv python3.11-dev build-essential git redis-server libibverbs1 numactl \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/rstar2
COPY pyproject.toml README.md ./
COPY requirements ./requirements
COPY scripts ./scripts
COPY rstar2_megatron ./rstar2_megatron
# There is no GPU while an image is built, so the GPU packages are asked for by name.
RUN RSTAR2_GPU=1 bash scripts/setup_env.sh
COPY . .
ENTRYPOINT ["bash", "run_rstar2.sh"]

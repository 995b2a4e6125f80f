# Training on NVIDIA GPUs. Built from the project's root on a machine with the NVIDIA container toolkit:
#   docker build -f docker/train.Dockerfile -t rstar2-train .
FROM nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04
# RSTAR2_GPU: no GPU is visible while an image is built, and the container must find the environment as it was built.
ENV DEBIAN_FRONTEND=noninteractive PYTHONUNBUFFERED=1 RSTAR2_GPU=1
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
RUN bash scripts/setup_env.sh
COPY . .
ENTRYPOINT ["bash", "run_rstar2.sh"]

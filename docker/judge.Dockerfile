# The Code Judge, for CPU nodes: HTTP server or execution workers. Built from the project's root:
#   docker build -f docker/judge.Dockerfile -t rstar2-judge .
# Only what judge/ and reward/ import is installed: no torch, no Ray, no SGLang.
FROM python:3.11-slim-bookworm
RUN apt-get update \
 && apt-get install -y --no-install-recommends redis-server g++ libseccomp2 \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/rstar2
COPY requirements/judge.txt requirements/constraints.txt requirements/programs.txt ./
RUN pip install --no-cache-dir -c constraints.txt -r judge.txt -r programs.txt
COPY rstar2_megatron ./rstar2_megatron
ENV PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
# JUDGE_TOKEN must be given: the judge refuses to listen beyond loopback without one.
ENTRYPOINT ["python", "-m", "rstar2_megatron.judge"]
CMD ["all", "--host", "0.0.0.0", "--port", "8088"]

#!/usr/bin/env bash
# Resolves requirements/gpu.in to requirements/gpu.lock: metadata only, no GPU, seconds. Versions that the lock already has stay
# where they still fit; `--upgrade` looks for newer ones.
#   scripts/lock_gpu.sh [OUTPUT] [arguments of `uv pip compile`]      PYTHON_VERSION=3.13: what another Python would lock
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
uv=${UV:-.venv/bin/uv}
command -v "$uv" >/dev/null || { echo "lock: no $uv; bash scripts/setup_env.sh --dev installs it" >&2; exit 1; }
output=requirements/gpu.lock
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then output=$1; shift; fi
# glibc 2.34 is what sglang's wheel asks for.
exec "$uv" pip compile requirements/gpu.in -c requirements/constraints.txt \
  --python-version "${PYTHON_VERSION:-3.11}" --python-platform x86_64-manylinux_2_34 \
  --no-emit-package transformer-engine --no-emit-package transformer-engine-cu13 --no-emit-package cuda-tile \
  --custom-compile-command "bash scripts/lock_gpu.sh" --quiet --output-file "$output" "$@"

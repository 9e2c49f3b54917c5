#!/bin/sh
# Prepares a machine with a GPU for gpu_queue.py: jaxformer with JAX into the Python at hand, then
# PyTorch with CUDA into an environment of its own, for which the queue does not wait.
#
#     sh benchmarks/gpu_setup.sh [cuda12|cuda13] [WHEELS]
#
# WHEELS is a folder of wheels, for a machine that reaches no package index: they are installed as
# they are, without what they need. PyTorch is not installed where the Python at hand has it.
set -eu
cd "$(dirname "$0")/.."
cuda=${1:-cuda13}
wheels=${2:-}
environment=${TMPDIR:-/tmp}/jaxformer-torch

if [ -n "$wheels" ]; then
    python3 -m pip install --quiet --no-index --no-deps "$wheels"/*.whl
    python3 -m pip install --quiet --no-index --no-deps --no-build-isolation -e . ||
        echo "jaxformer itself could not be installed: start the queue with PYTHONPATH=$PWD" >&2
elif python3 -c 'import jax, sys; sys.exit(jax.default_backend() != "gpu")' 2>/dev/null; then
    python3 -m pip install --quiet -e . # JAX sees the GPU already
else
    python3 -m pip install --quiet -e ".[$cuda]"
fi

if ! python3 -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null &&
    [ -z "$wheels" ]; then
    mkdir -p "$environment"
    { python3 -m venv "$environment" && "$environment/bin/pip" install --quiet torch numpy &&
        touch "$environment/ready" || touch "$environment/failed"; } >"$environment/log" 2>&1 &
fi

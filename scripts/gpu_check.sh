#!/usr/bin/env bash
# Test and measure dicp_cuda on a machine with a CUDA GPU, in at most 9 minutes; nothing is installed.
#   bash scripts/gpu_check.sh [OUT_DIR [SECONDS [PART...]]]   default: gpu_check_results 500, all parts
# Writes gpu_check.json and gpu_check.md there. Parts: inference (with the tests, conformance and kernels), tuned, compile,
# training. --models resnet50: of that model alone, as a peer may need all of the time to tune it.
# Needs torch 2.11 or later with its Triton and setuptools, numpy, pytest, transformers. No GPU: exit status 3.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out="${1:-gpu_check_results}"
seconds="${2:-500}"
python="${PYTHON:-python3}"
if ! "$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
  echo "gpu_check: torch sees no CUDA GPU here. Without one, run: python -m pytest test/vendor/cuda" >&2
  exit 3
fi
mkdir -p "$out"
# The names of backends and vendors, as an installation would leave them, for this run alone.
names="$(mktemp -d)"
trap 'rm -rf "$names"' EXIT
"$python" setup.py -q egg_info --egg-base "$names"
PYTHONPATH="$PWD:$PWD/test:$names${PYTHONPATH:+:$PYTHONPATH}" timeout $((seconds + 40)) "$python" scripts/gpu_check.py --out "$out" --seconds "$seconds" "${@:3}"

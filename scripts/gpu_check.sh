#!/usr/bin/env bash
# Test and measure dicp_cuda on a machine with a CUDA GPU, in at most 9 minutes; nothing is installed.
#   bash scripts/gpu_check.sh [OUT_DIR]       default: gpu_check_results; writes gpu_check.json and gpu_check.md there
# Needs torch 2.11 or later, its Triton, numpy; with pytest and transformers it does more. No GPU: exit status 3.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out="${1:-gpu_check_results}"
python="${PYTHON:-python3}"
if ! "$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
  echo "gpu_check: torch sees no CUDA GPU here. Without one, run: python -m pytest test/vendor/cuda" >&2
  exit 3
fi
mkdir -p "$out"
PYTHONPATH="$PWD:$PWD/test${PYTHONPATH:+:$PYTHONPATH}" exec timeout 560 "$python" scripts/gpu_check.py --out "$out"

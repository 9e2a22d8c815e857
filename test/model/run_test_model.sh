#!/usr/bin/env bash
# Whole models under a backend, held to eager's results:
#   bash test/model/run_test_model.sh <model|all> <backend> [true|false|all] [--size small] [--dtype fp32] [--json FILE]
# Models: llama qwen mixtral gpt2 bert t5 whisper vit resnet50 mobilenet_v2 convnext unet. Backends: dicp_cpu (cpugraph), dicp_cuda (cudagraph), inductor, aot_eager, eager.
# Third: dynamic sizes (default false; `all` runs both, and fails if either does). LLAMA_MODEL_DIR: a real checkpoint.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
cd "$root"
if [ -z "${VIRTUAL_ENV:-}" ]; then
  bash scripts/setup_env.sh
  # shellcheck disable=SC1091
  . "${DICP_VENV:-.venv}/bin/activate"
fi
PYTHONPATH="$root/test${PYTHONPATH:+:$PYTHONPATH}" exec python -m model.run "$@"

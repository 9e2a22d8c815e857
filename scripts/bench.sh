#!/usr/bin/env bash
# Time, compile time, peak memory and overhead per call: eager, Inductor and dicp side by side.
#   bash scripts/bench.sh                                     LLaMA and ResNet-50 in fp32
#   bash scripts/bench.sh <arguments of python -m dicp.bench>
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup_env.sh
# shellcheck disable=SC1091
. "${DICP_VENV:-.venv}/bin/activate"
if [ $# -eq 0 ]; then
  set -- --models llama,llama-decode,resnet50 --dtypes fp32 --contestants eager,inductor,dicp_cpu --kinds steady,compile,memory --repeat 3
fi
exec python -m dicp.bench "$@"

#!/usr/bin/env bash
# Every architecture of transformers (or of timm, where it is installed), small, under a backend, held to eager's results:
#   bash test/model/run_test_architectures.sh [REGEX] [backend] [--of timm] [--dynamic] [--jobs N] [--results FILE]
# All of them take hours on two CPUs; with --results FILE the same command goes on where it stopped.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
cd "$root"
if [ -z "${VIRTUAL_ENV:-}" ]; then
  bash scripts/setup_env.sh
  # shellcheck disable=SC1091
  . "${DICP_VENV:-.venv}/bin/activate"
fi
export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error
PYTHONPATH="$root/test${PYTHONPATH:+:$PYTHONPATH}" exec python -m model.architectures "$@"

#!/usr/bin/env bash
# The main job: set up the environment, generate text with LLaMA under eager PyTorch, Inductor and dicp_cpu, check that
# the tokens agree, and print a table of times. Arguments go to scripts/generate.py; LLAMA_MODEL_DIR names a checkpoint.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup_env.sh
exec "${DICP_VENV:-.venv}/bin/python" scripts/generate.py "$@"

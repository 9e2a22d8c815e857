#!/usr/bin/env bash
# Tests as on a processor with AVX-512, on one with AVX2 alone: generated code has vectors of 16 whose instructions
# are emulated, choices are those for such a processor. Right or wrong can be seen, how fast cannot. Libraries, bf16
# instructions and processes that tests start see the processor that is there.
#   bash scripts/emulate_avx512.sh                 operators, kernels, templates, models
#   bash scripts/emulate_avx512.sh <pytest args>   these tests instead
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup_env.sh
# shellcheck disable=SC1091
. "${DICP_VENV:-.venv}/bin/activate"

[ $# -gt 0 ] || set -- test/codegen test/op test/vendor/cpu test/schedule test/model
work="$(mktemp -d)"  # what is built here is of no use to the user's cache
trap 'rm -rf "$work"' EXIT
mkdir -m 700 "$work/cache"
export DICP_CACHE_DIR="$work/cache" DICP_CXX="bash $PWD/test/emulation/cxx"
PYTHONPATH="$PWD/test/emulation${PYTHONPATH:+:$PYTHONPATH}" \
  python -m pytest -q -p no:cacheprovider -p emulated_avx512 -n "$(nproc)" --maxprocesses 4 --dist loadfile \
  -m "not slow" "$@"

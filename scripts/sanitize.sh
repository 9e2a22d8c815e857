#!/usr/bin/env bash
# Tests whose generated code is built with g++'s AddressSanitizer: what reads or writes beyond memory that torch
# allocated ends its process; the reports, which name the kernel and its line, come last. Inside the arena nothing is
# noticed.
#   bash scripts/sanitize.sh                 operators, kernels, and the templates around the libraries
#   bash scripts/sanitize.sh <pytest args>   these tests instead
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup_env.sh || exit 1
# shellcheck disable=SC1091
. "${DICP_VENV:-.venv}/bin/activate"

[ $# -gt 0 ] || set -- test/codegen test/op test/vendor/cpu test/schedule test/model
work="$(mktemp -d)"  # entries of other runs would be as good, but are not wanted in the user's cache
trap 'rm -rf "$work"' EXIT
mkdir -m 700 "$work/cache"
export DICP_CXX="g++ -fsanitize=address -g1" DICP_CACHE_DIR="$work/cache" OMP_WAIT_POLICY=passive
# Python and torch leak at exit, and free what another library allocated; pytest would keep what goes to stderr
ASAN_OPTIONS="detect_leaks=0:alloc_dealloc_mismatch=0:detect_odr_violation=0:abort_on_error=1"
export ASAN_OPTIONS="$ASAN_OPTIONS:log_path=$work/report"
# the runtime comes first in every process, those of compilers too
LD_PRELOAD="$(g++ -print-file-name=libasan.so):$(g++ -print-file-name=libstdc++.so)" \
  python -m pytest -q -p no:cacheprovider -n "$(nproc)" --maxprocesses 4 --max-worker-restart 0 --dist loadfile \
  -m "not slow" "$@"
status=$?
for report in "$work"/report.*; do
  [ -e "$report" ] || continue
  grep -vE '^(  |=>)0x|^    #([6-9]|[1-9][0-9]+) ' "$report"  # no dump of memory, nor Python's own frames
  status=1
done
exit $status

#!/usr/bin/env bash
# Check the project: lint, types, tests. Sets up the environment first.
#   bash scripts/test.sh                 what CI runs
#   bash scripts/test.sh --all           that, the long suites, and the models at full size
#   bash scripts/test.sh <pytest args>   the same with these arguments to pytest instead
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

all=false
if [ "${1:-}" = --all ]; then all=true; shift; fi

bash scripts/setup_env.sh || exit 1
# shellcheck disable=SC1091
. "${DICP_VENV:-.venv}/bin/activate"

# Threads that wait must not spin: tests share the CPUs with compilers, and with whatever else the machine does.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"

failed=()
step() {  # step <name> <command>...
  local name="$1" start=$SECONDS
  shift
  printf '== %s\n' "$name"
  "$@" || failed+=("$name")
  printf '== %s: %d s\n\n' "$name" $((SECONDS - start))
}

# Tests of one file stay together: they share what their fixtures made. The longest files first (test/conftest.py).
parallel=(-n "$(nproc)" --maxprocesses 4 --dist loadfile --no-loadscope-reorder)

step "ruff" python -m ruff check .
step "mypy" python -m mypy
python scripts/sizes.py
echo
if [ $# -gt 0 ]; then
  step "tests" python -m pytest -q "$@"
elif $all; then
  step "tests" python -m pytest -q "${parallel[@]}" --durations=20
  step "models" bash test/model/run_test_model.sh all dicp_cpu all
else
  step "tests" python -m pytest -q "${parallel[@]}" -m "not slow" --durations=10
fi

if [ ${#failed[@]} -gt 0 ]; then
  printf 'FAILED: %s (%d s in all)\n' "$(IFS=,; echo "${failed[*]}")" "$SECONDS"
  exit 1
fi
printf 'ok: all checks passed (%d s in all)\n' "$SECONDS"

#!/usr/bin/env bash
# Operators under a backend, held to eager's results:
#   bash test/op/run_test_op.sh <op|slice|wide|all> <backend> [true|false|all]
# op: a name of PyTorch's operator database (add, nn.functional.gelu), in every dtype, forward and backward.
# slice: what CI runs. wide: its operators in float32, bfloat16 and int64, forward and backward, over 5,000 cases. all: the whole
# database. Both are kept in $DICP_CONFORMANCE_DIR (default .conformance/<backend>[-wide]): the same command goes on where it stopped.
# Third: dynamic sizes (default false; all: static and dynamic).
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
cd "$root"
if [ $# -lt 2 ]; then
  sed -n '2,7p' "${BASH_SOURCE[0]}" | sed 's/^# \{0,1\}//'
  exit 2
fi
if [ -z "${VIRTUAL_ENV:-}" ]; then
  bash scripts/setup_env.sh
  # shellcheck disable=SC1091
  . "${DICP_VENV:-.venv}/bin/activate"
fi
op="$1" backend="$2" dynamic="${3:-false}"
case "$dynamic" in
  true) shapes=(--only-dynamic) ;;
  false) shapes=() ;;
  all) shapes=(--dynamic) ;;
  *) echo "third argument: true, false or all, not '$dynamic'" >&2; exit 2 ;;
esac
case "$op" in
  slice) exec python -m pytest -q test/op --op-backend "$backend" ;;
  wide)
    dir="${DICP_CONFORMANCE_DIR:-.conformance/$backend-wide}"
    mkdir -p "$dir"
    exec python -m dicp.conformance --backend "$backend" "${shapes[@]}" --grad --samples 3 --dtypes float32,bfloat16,int64 \
      --ops "$(python test/op/ci_slice.py)" --resume "$dir" --json "$dir/report.json" ;;
  all)
    dir="${DICP_CONFORMANCE_DIR:-.conformance/$backend}"
    mkdir -p "$dir"
    exec python -m dicp.conformance --backend "$backend" "${shapes[@]}" --grad --resume "$dir" \
      --html "$dir/report.html" --json "$dir/report.json" --junit "$dir/report.xml" ;;
  *) exec python -m pytest -q test/op/test_ops.py --op "$op" --op-backend "$backend" --op-dynamic "$dynamic" ;;
esac

"""Known failures: `{backend: {operator: {dtypes: reason}}}`. An entry whose cases all pass fails the run."""

from __future__ import annotations

EVERY = frozenset("float32 float64 bfloat16 float16 int64 int32 int8 uint8 bool complex64 complex128".split())

EXPECTED_FAILURES: dict[str, dict[str, dict[frozenset[str], str]]] = {
    "dicp_cpu": {
        "tensor_split": {
            EVERY: "pieces between positions read from a tensor have sizes and offsets that only the slices "
            "themselves define; only where a user asks Dynamo to capture them",
        },
        "unique_consecutive": {
            EVERY: "torch's fake implementation promises results of another rank than eager's where dim "
            "counts from the end; only where a user asks Dynamo to capture them",
        },
    },
}


def reason_for(backend: str, operator: str, dtype: str) -> str | None:
    """Why this operator is known to fail in this dtype, None where it must pass."""
    for dtypes, reason in EXPECTED_FAILURES.get(backend, {}).get(operator, {}).items():
        if dtype in dtypes:
            return reason
    return None


def entries(backend: str) -> list[tuple[str, frozenset[str], str]]:
    """(operator, dtypes, reason) of every entry."""
    return [
        (op, dtypes, reason)
        for op, table in EXPECTED_FAILURES.get(backend, {}).items()
        for dtypes, reason in table.items()
    ]

"""Known failures: `{backend: {operator: {dtypes: reason}}}`. An entry whose cases all pass fails the run."""

from __future__ import annotations

EXPECTED_FAILURES: dict[str, dict[str, dict[frozenset[str], str]]] = {}


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

"""Known failures: `{backend: {operator: {kinds: reason}}}`, a kind being a unit's key without the operator.

A kind in the table all of whose cases pass fails the run.
"""

from __future__ import annotations

_SPLIT = frozenset({"complex64|forward|static", "complex64|gradient|static"})
_EXPANDED = "of an expanded complex tensor: equal values, in memory of their own instead of with strides of 0"

EXPECTED_FAILURES: dict[str, dict[str, dict[frozenset[str], str]]] = {
    "dicp_cpu": {
        "unsafe_chunk": {_SPLIT: _EXPANDED},
        "unsafe_split": {_SPLIT: _EXPANDED},
        "nn.functional.normalize": {
            frozenset({"float32|gradient|static"}): (
                "the gradient of x / |x| for one number is 0: at this sample eager's roundings cancel, "
                "and what a product rounds off is left here, 1e-9"
            ),
        },
    },
}


def kind_of(key: str) -> str:
    """`add|float32|forward|static` -> `float32|forward|static`"""
    return key.partition("|")[2]


def reason_for(backend: str, operator: str, kind: str) -> str | None:
    """Why this operator is known to fail in units of this kind, None where it must pass."""
    for kinds, reason in EXPECTED_FAILURES.get(backend, {}).get(operator, {}).items():
        if kind in kinds:
            return reason
    return None


def entries(backend: str) -> list[tuple[str, frozenset[str], str]]:
    """(operator, kinds, reason) of every entry."""
    return [
        (op, kinds, reason)
        for op, table in EXPECTED_FAILURES.get(backend, {}).items()
        for kinds, reason in table.items()
    ]

"""DeepLink's operator list (category, name, priority P0/P1/P2), mapped to the operator database, and a
category for the rest.

`grades.csv`: category, name, grade, kind (dense or sparse), operators (database names, spaces between),
reason (why none).
"""

from __future__ import annotations

import csv
import functools
from dataclasses import dataclass
from pathlib import Path

from .opdb import Operator


@dataclass(frozen=True)
class Graded:
    """A row of DeepLink's list."""

    category: str
    name: str
    grade: str
    kind: str
    operators: tuple[str, ...]
    reason: str


@functools.cache
def rows() -> tuple[Graded, ...]:
    """The whole list, in its own order."""
    with (Path(__file__).parent / "grades.csv").open(newline="") as f:
        return tuple(
            Graded(
                r["category"], r["name"], r["grade"], r["kind"], tuple(r["operators"].split()), r["reason"]
            )
            for r in csv.DictReader(f)
        )


@functools.cache
def _by_operator() -> dict[str, Graded]:
    """Of several rows naming an operator, the one of the highest grade."""
    best: dict[str, Graded] = {}
    for row in rows():
        for name in row.operators:
            if name not in best or row.grade < best[name].grade:
                best[name] = row
    return best


def grade_of(name: str) -> str:
    """P0, P1, P2, or - for operators outside the list."""
    found = _by_operator().get(name)
    return found.grade if found else "-"


PREFIXES = {
    "nn.functional.": "Neural network",
    "linalg.": "Linalg",
    "fft.": "FFT",
    "special.": "Special functions",
    "masked.": "Masked",
    "signal.": "Signal windows",
    "sparse.": "Sparse",
    "jiterator": "CUDA only",
    "extra.": "Composite",
    "bitwise_": "Element-wise",
    "torch.": "Private",
    "_": "Private",
}


def category_of(op: Operator) -> str:
    """DeepLink's category, else one by namespace or by what the database says the operator is."""
    found = _by_operator().get(op.name)
    if found:
        return found.category
    if op.is_ufunc or op.name.startswith("__r"):
        return "Element-wise"
    if op.is_reduction:
        return "Reduce"
    for prefix, category in PREFIXES.items():
        if op.name.startswith(prefix):
            return category
    return "Other"


def unmapped() -> list[Graded]:
    """Rows of the list that no database operator stands for, each with its reason."""
    return [row for row in rows() if not row.operators]

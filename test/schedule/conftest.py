"""Reductions are split by the number of threads: here there are two."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from lowered import threads


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    with threads(2):
        yield

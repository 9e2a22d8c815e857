"""Being here puts this folder on the import path: tests share `graphs.py`. The files that take longest run
first: each file is one worker's, and none should be left with one of them at the end."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo

LONGEST = ("test_models.py", "test_ops.py", "test_stress.py", "test_harness.py", "test_aten_calls.py")


def position(item: pytest.Function, names: str | Sequence[str], values: Iterable[object]) -> int:
    """Which of the values of one `parametrize` the case was given."""
    names = [n.strip() for n in names.split(",")] if isinstance(names, str) else names
    own = [item.callspec.params[name] for name in names]
    for k, value in enumerate(values):
        given: Any = getattr(value, "values", None)  # of a pytest.param
        given = given if isinstance(given, tuple) else (value,) if len(names) == 1 else value
        if all(a is b for a, b in zip(own, given, strict=True)):
            return k
    raise AssertionError(f"{item.name}: {own} is none of its parameters")


def left_to_long_runs(item: pytest.Item) -> bool:
    """Whether CI leaves out this case of a test that is marked one_in(n). It runs those whose parameters' positions
    add up to a multiple of n, so that each value of a parameter is there where the others' positions leave all
    remainders, and each pair of values where those of a third do. Every n-th case would leave out values."""
    mark = item.get_closest_marker("one_in")
    if mark is None:
        return False
    assert isinstance(item, pytest.Function)
    positions = [position(item, *m.args) for m in item.iter_markers("parametrize")]
    assert len(positions) > 1, f"{item.name}: of one list of parameters, one_in(n) would run every n-th alone"
    return sum(positions) % int(mark.args[0]) != 0


# First of all hooks: `-m` selects by what is marked here.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as slow what CI leaves out. Files of LONGEST first, the rest as collected (`pytest -n` takes this order
    with --no-loadscope-reorder)."""
    for item in items:
        if left_to_long_runs(item):
            item.add_marker(pytest.mark.slow)
    rank = {name: k for k, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


@pytest.hookimpl(tryfirst=True)
def pytest_make_collect_report(collector: pytest.Collector) -> None:
    """What a test file draws as it is imported is the same in each run, whichever files are run with it."""
    if isinstance(collector, pytest.Module):
        torch.manual_seed(0)


def pytest_configure() -> None:
    """Dynamo times the guards of each compile for its logs, on caches that it first empties: 25 ms a compile."""
    pytest.MonkeyPatch().setattr("torch._dynamo.guards.profile_guard_manager", lambda *timed: 0.0)


def pytest_collection_finish() -> None:
    """What is there before the first test stays: garbage collections need not walk through it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)  # compiles make few cycles: a twentieth of the time went into looking for them


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """In each run, whichever tests are run with it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def own_torch_caches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """torch's caches of compiled graphs, empty for each test: what a test compiles is compiled in it."""
    folder = tmp_path_factory.mktemp("torch")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    return folder

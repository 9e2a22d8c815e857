"""Being here puts this folder on the import path: tests share `graphs.py`. The files that take longest run
first: each file is one worker's, and none should be left with one of them at the end."""

from __future__ import annotations

from pathlib import Path

import pytest

LONGEST = ("test_models.py", "test_ops.py", "test_stress.py", "test_harness.py", "test_aten_calls.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of LONGEST first, the rest as collected (`pytest -n` takes this order with
    --no-loadscope-reorder)."""
    rank = {name: k for k, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


@pytest.fixture(autouse=True)
def own_torch_caches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """torch's caches of compiled graphs, empty for each test: what a test compiles is compiled in it."""
    folder = tmp_path_factory.mktemp("torch")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    return folder

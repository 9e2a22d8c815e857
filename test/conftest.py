"""Being here puts this folder on the import path: tests share `graphs.py`."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_torch_caches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """torch's caches of compiled graphs, empty for each test: what a test compiles is compiled in it."""
    folder = tmp_path_factory.mktemp("torch")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    return folder

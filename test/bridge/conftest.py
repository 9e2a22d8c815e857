"""Compiles in these tests share one build cache per run, and see none of the caller's DICP_* settings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of all of a run's processes."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"
    shared.mkdir(mode=0o700, exist_ok=True)
    return shared


@pytest.fixture(autouse=True)
def clean_environment(shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [n for n in os.environ if n.startswith("DICP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DICP_CACHE_DIR", os.environ.get("TEST_CACHE_DIR", str(shared_cache)))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()

"""Every test here works on its own empty cache and without the caller's DICP_* settings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dicp.runtime import cache


@pytest.fixture(autouse=True)
def clean_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("DICP_")] + ["CXX", "XDG_CACHE_HOME"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DICP_CACHE_DIR", str(tmp_path / "cache"))
    cache._warn_once.cache_clear()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: long fault suites, left out of CI")

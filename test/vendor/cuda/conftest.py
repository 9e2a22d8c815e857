"""Fixtures: a cache of the test session's own, so that one run does not depend on another."""

from __future__ import annotations

import importlib.util

import pytest
import torch

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]


@pytest.fixture(scope="session")
def cuda_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("dicp_cuda"))


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()

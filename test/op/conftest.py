"""Options of the operator tests, and one pool of worker processes for all of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("dicp operators")
    group.addoption("--op", default="", help="a full operator name instead of CI's slice")
    group.addoption("--op-backend", default="dicp_cpu", help="the torch.compile backend under test")
    group.addoption("--op-dynamic", default="false", choices=("true", "false", "all"))


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> str:
    """The torch.compile backend under test."""
    return str(request.config.getoption("--op-backend", "dicp_cpu"))

"""What gets installed."""

import runpy
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What setup.py gives to setup()."""
    found: dict[str, Any] = {}
    monkeypatch.setattr("setuptools.setup", lambda **given: found.update(given))
    monkeypatch.chdir(ROOT)
    runpy.run_path(str(ROOT / "setup.py"))
    return found


def test_every_file_of_the_package_is_installed(arguments: dict[str, Any]) -> None:
    data = arguments["package_data"]
    for path in (ROOT / "dicp").rglob("*"):
        if not path.is_file() or "__pycache__" in path.parts:
            continue
        package = path.parent
        while not (package / "__init__.py").exists():
            package = package.parent
        name = ".".join(package.relative_to(ROOT).parts)
        assert name in arguments["packages"]
        inside = str(path.relative_to(package))
        assert inside.endswith(".py") or any(fnmatch(inside, p) for p in data.get(name, ())), path


def test_editable_install_is_a_path_file(arguments: dict[str, Any]) -> None:
    """An import hook would lose against a folder named dicp beside the user's script."""
    assert arguments["package_dir"] == {"": "."}

"""A new vendor's package: what `python -m dicp.scaffold` writes can be installed, passes its tests and the suite."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dicp.errors import OptionError
from dicp.scaffold import EXAMPLES, Kind, __main__, render, write


def run(*arguments: object, cwd: Path, path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


@pytest.fixture(scope="module", params=EXAMPLES)
def package(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A vendor's package, and where it is installed to."""
    folder, site = tmp_path_factory.mktemp("new"), tmp_path_factory.mktemp("site")
    options = [] if request.param == "kernels" else [f"--{request.param}"]
    assert __main__.main(["my_chip2", *options, "--into", str(folder)]) == 0
    written = folder / "my_chip2"
    # no network: neither pip's isolated builds nor dependencies
    how = ("--no-build-isolation", "--no-deps", "--no-index", "--quiet", "--target", site)
    done = run("-m", "pip", "install", *how, written, cwd=folder, path=site)
    assert done.returncode == 0, done.stderr
    return written, site


def test_its_tests_pass(package: tuple[Path, Path]) -> None:
    written, site = package
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", cwd=written, path=site)
    assert done.returncode == 0 and "20 passed" in done.stdout, done.stdout + done.stderr


def test_the_conformance_suite_knows_it(package: tuple[Path, Path]) -> None:
    written, site = package
    ops = ("--ops", "^(add|softmax)$", "--dtypes", "float32", "--samples", "1")
    done = run("-m", "dicp.conformance", "--vendor", "my_chip2", *ops, cwd=written.parent, path=site)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "backend my_chip2" in done.stdout and " 0 fail," in done.stdout, done.stdout


@pytest.mark.parametrize("kind", EXAMPLES)
def test_no_other_name_is_left_in_it(kind: Kind) -> None:
    for path, text in render("acme", kind).items():
        assert "toy" not in text.lower() and "scaffold" not in text, path


@pytest.mark.parametrize("name", ["my-chip", "2chip", "Chip", "class", "torch", ""])
def test_names_that_will_not_do(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OptionError):
        write(name, tmp_path)
    assert __main__.main([name, "--into", str(tmp_path)]) == 2 and not list(tmp_path.iterdir())
    assert "dicp.scaffold: " in capsys.readouterr().err


def test_a_package_is_of_one_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        __main__.main(["acme", "--loops", "--graphs", "--into", str(tmp_path)])
    assert "not allowed with argument" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_nothing_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "acme").mkdir()
    assert __main__.main(["acme", "--into", str(tmp_path)]) == 2 and "exists" in capsys.readouterr().err
    assert not list((tmp_path / "acme").iterdir())

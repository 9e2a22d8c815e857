"""Figures as tables: who is ahead, what is lost, what failed; with a picture where it can be drawn."""

import json
from pathlib import Path
from typing import Any

import pytest

from dicp.bench import __main__ as command
from dicp.bench import report


def row(workload: str, phase: str = "inference", **found: dict[str, Any]) -> dict[str, Any]:
    about = {"workload": workload, "phase": phase, "dtype": "fp32", "unit": "tokens", "work": 100.0}
    return about | {"flops": 2e9, "weight_bytes": 10**9, "contestants": found}


@pytest.fixture
def results() -> dict[str, Any]:
    ahead = row("bert", eager={"ms": 30.0}, inductor={"ms": 20.0}, dicp_cpu={"ms": 10.0})
    behind = row("unet", "training", eager={"ms": 10.0}, inductor={"ms": 5.0}, dicp_cpu={"ms": 10.0})
    broken = row("vit", eager={"ms": 1.0}, inductor={"failed": "a\nBoom: 7"}, dicp_cpu={"ms": 1.0})
    return {"machine": {"cpu": "X", "threads": 2}, "settings": {"rounds": 7}, "rows": [ahead, behind, broken]}


def test_ratio_is_best_peer_over_best_dicp(results: dict[str, Any]) -> None:
    ahead, behind, broken = results["rows"]
    names = ["eager", "inductor", "dicp_cpu"]
    assert [report.ratio(r, "ms", names) for r in (ahead, behind, broken)] == [2.0, 0.5, 1.0]
    assert report.ratio(broken, "ms", names, compilers=True) is None


def test_losses_and_failures_are_shown(results: dict[str, Any]) -> None:
    assert report.losses(results) == [
        "unet training fp32: dicp_cpu 10.00 ms, inductor 5.00 (0.50x)",
        "vit fp32: inductor failed: Boom: 7",
    ]
    for page in (report.text(results), report.markdown(results)):
        assert "unet training fp32: dicp_cpu 10.00 ms" in page
        assert "failed" in page
        assert "0.50 <" in page


def test_geometric_mean_and_throughput(results: dict[str, Any]) -> None:
    times, throughput = report.tables(results)
    assert times.lines[-1][0] == "geometric mean"
    assert times.lines[-1][-1] == "1.00"
    assert throughput.lines[0] == ["bert fp32, tokens/s", "3333.3", "5000.0", "10000.0", "200.0", "100.0"]


def test_roofline(results: dict[str, Any]) -> None:
    """The floor is the slower of arithmetic and reading; the rest of the table is relative to it."""
    results["rows"][0] |= {"gflops": 250.0, "read_gb_per_s": 500.0}
    results["rows"][1] |= {"gflops": 1000.0, "read_gb_per_s": 250.0}
    roofline = report.tables(results)[2]
    assert [line[4:] for line in roofline.lines] == [
        ["8.0", "10.0", "80 %", "2.50"],
        ["4.0", "10.0", "40 %", "1.25"],
        ["", "", "", "1.77"],
    ]


def test_plot_without_matplotlib_says_so(
    results: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    earlier = tmp_path / "results.json"
    earlier.write_text(json.dumps(results))
    page = tmp_path / "page.md"
    picture = tmp_path / "x.png"
    given = ["--from", str(earlier), "--plot", str(picture), "--markdown", str(page)]
    assert command.main(given) == 1
    assert "pip install matplotlib" in capsys.readouterr().err
    assert "| bert fp32 | 30.00 | 20.00 | 10.00 | 2.00 |" in page.read_text()
    assert not picture.exists()


def test_plot(results: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "x.png"
    assert report.plot(results, picture) is None
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "given, said",
    [
        (["--models", "bret"], "no 'bret'"),
        (["--contestants", "eager,indoctor"], "no 'indoctor'"),
        (["--rounds", "3"], "at least 7"),
    ],
)
def test_wrong_arguments(given: list[str], said: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as stop:
        command.parse(given)
    assert stop.value.code == 2
    assert said in capsys.readouterr().err

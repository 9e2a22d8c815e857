"""What a compile tells: explain, counters, debug lines, dumps, logs."""

from __future__ import annotations

import importlib
import logging
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from checks import compiles

import dicp


def r(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def model(x, w):
    y = F.gelu(x @ w)
    return y.softmax(-1), F.rrelu(w, training=True)


def test_counters_count_kernels_libraries_and_externs() -> None:
    counters = torch._dynamo.utils.counters["dicp"]
    counters.clear()
    torch.compile(model, backend="dicp_cpu")(r(6, 8), r(8, 8))
    assert counters["graphs"] == 1
    assert counters["kernels"] >= 1 and counters["library"] >= 1
    assert counters["extern"] == 1
    assert [k for k in counters if k.startswith("extern:")] == ["extern:aten.rrelu_with_noise_functional.default"]


def test_explain_lists_what_was_made() -> None:
    found = dicp.explain(model, r(6, 8), r(8, 8), backend="dicp_cpu")
    (graph,) = found.graphs
    assert graph.role == "inference" and not found.breaks
    assert sum(k["launches"] for k in graph.kernels) >= 1
    assert any("softmax" in line for k in graph.kernels for line in k["fuses"])
    assert len(graph.externs) == 1 and "rrelu" in graph.externs[0] and Path(__file__).name in graph.externs[0]
    assert graph.externs[0].endswith("(rrelu_with_noise_functional is a library op)")
    assert {"passes", "lower", "fuse", "kernels", "memory", "build"} <= set(graph.seconds)
    text = str(found)
    assert "EXTERN" in text and "arena" in text and "1 graph, 0 graph breaks" in text
    assert found.to_dict()["graphs"][0]["name"] == graph.name


def test_explain_leaves_complex_results_alone() -> None:
    w = torch.randn(3, dtype=torch.complex64, requires_grad=True)
    found = dicp.explain(lambda x: (x * w, x * w.real.sin()), r(3), backend="dicp_cpu")
    assert found.graphs and w.grad is not None


def test_explain_lists_every_fused_op() -> None:
    found = dicp.explain(lambda x, y: (x.tanh() * y).sum(-1) + 1, r(4, 70), r(4, 70), backend="dicp_cpu")
    (kernel,) = found.graphs[0].kernels
    assert [line.split(".")[0].split()[0] for line in kernel["fuses"]] == ["tanh", "mul", "sum", "add"]


def test_explain_names_breaks_and_runs_the_backward() -> None:
    layer = torch.nn.Linear(4, 4)

    def f(x):
        y = layer(x)
        if y.sum().item() > 1e9:  # the break
            y = y + 1
        return y.relu()

    found = dicp.explain(f, r(2, 4), backend="dicp_cpu")
    assert len(found.breaks) == 1
    assert Path(__file__).name in found.breaks[0] and "# the break" in found.breaks[0]
    assert [g.role for g in found.graphs].count("backward") == 2


def test_explain_stays_a_function_after_use() -> None:
    dicp.explain(lambda x: x + 1, r(3), backend="dicp_cpu")
    importlib.import_module("dicp.explain")
    assert str(dicp.explain(lambda x: x + 1, r(3), backend="dicp_cpu")).startswith("1 graph")
    assert "no graph came to dicp" in str(dicp.explain(lambda x: x + 1, r(3), backend="eager"))


def test_dump_writes_every_stage(tmp_path: Path) -> None:
    torch.compile(
        lambda x, w: F.gelu(x @ w).softmax(-1), backend="dicp_cpu", options={"dump": str(tmp_path)}
    )(r(6, 8), r(8, 8))
    (folder,) = tmp_path.iterdir()
    files = {f.name: f.read_text() for f in folder.iterdir()}
    assert "00_import.txt" in files and files["00_import.txt"].startswith("graph(")
    assert Path(__file__).name in files["00_import.txt"]
    assert {"30_lowered.txt", "40_kernels.txt", "50_memory.txt"} <= set(files)
    assert "kernel " in files["40_kernels.txt"] and "reduce max" in files["40_kernels.txt"]
    assert files["50_memory.txt"].startswith("arena ")
    assert any(n.startswith("01_") for n in files) and any("(unchanged)" in t for t in files.values())
    sources = [t for n, t in files.items() if n.endswith(".cpp")]
    assert sources and any("#pragma" in t or "void " in t for t in sources)
    assert "def call(args)" in files["call.py"]


def test_a_dump_that_cannot_be_written_names_its_option(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(Exception, match=f"folder '{file}' of the option dump.*\n.*DICP_DUMP"):
        torch.compile(lambda x: x * 3, backend="dicp_cpu", options={"dump": str(file)})(r(3))


def test_a_graph_compiled_twice_dumps_twice_and_equally(tmp_path: Path) -> None:
    """Nothing in the text depends on the run: two dumps of one model differ in times only."""
    texts = []
    for k in range(2):
        torch._dynamo.reset()
        torch.compile(
            lambda x: (x * 2).softmax(-1).sum(0), backend="dicp_cpu", options={"dump": str(tmp_path / str(k))}
        )(r(6, 8))
        (folder,) = (tmp_path / str(k)).iterdir()
        stages = [f for f in folder.iterdir() if f.name[:2] in ("00", "20", "30", "40")]
        texts.append({f.name: re.sub(r"^# \d+\.\d ms$", "", f.read_text(), flags=re.M) for f in stages})
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("level", "shown", "hidden"),
    [
        (1, "kernels, ", "graph("),
        (3, "(unchanged)", "#include"),
        (4, "#include", "reduce max"),
        (5, "reduce max", "nothing"),
    ],
)
def test_debug_levels(
    level: int, shown: str, hidden: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DICP_DEBUG", str(level))
    torch.compile(lambda x: x.softmax(-1), backend="dicp_cpu")(r(6, 8))
    text = capfd.readouterr().err
    assert shown in text and hidden not in text
    assert text.count("dicp: graph") >= 1
    monkeypatch.setenv("DICP_DEBUG", "0")
    torch._dynamo.reset()
    torch.compile(lambda x: x.softmax(-1), backend="dicp_cpu")(r(6, 8))
    assert capfd.readouterr().err == ""


def test_log_line_per_graph(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="dicp"):
        torch.compile(lambda x: x + 1, backend="dicp_cpu")(r(3))
    lines = [x.message for x in caplog.records if x.name == "dicp"]
    assert len(lines) == 1 and "1 kernels" in lines[0] and "0 externs" in lines[0]


def test_generated_code_names_the_users_lines() -> None:
    with compiles() as found:
        torch.compile(lambda x: x.exp() + 1, backend="dicp_cpu")(r(3))  # the line
    (program,) = [c.program for c in found]
    kernels = "".join(s for n, s in program.sources.items() if n.startswith("kernels"))
    assert f"{Path(__file__).name}:" in kernels and "# the line" in kernels


@torch.compiler.nested_compile_region
def region(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w)


VERIFIED = {
    "passes": lambda x, w: F.layer_norm(F.gelu(x @ w), (8,)),
    "a region hands its inputs on to the backward": lambda x, w: region(region(x, w), w),
    "a check without a result": lambda x, w: torch.cond(
        x.sum() > 0, lambda x: x[:2].clone(), lambda x: x[:3].clone(), (x,)
    ),
    "an input that is written is returned": lambda x, w: (x.view(-1), x.relu_(), x[1:]),
    "a dtype that is not as traced": lambda x, w: torch.quantize_per_tensor(x, 0.1, 10, torch.quint8),
}


@pytest.mark.parametrize("name", VERIFIED)
def test_verify_option_lets_pass_what_is_right(name: str) -> None:
    torch._dynamo.reset()
    grad = "backward" in name
    x, w = r(6, 8).requires_grad_(grad), r(8, 8).requires_grad_(grad)
    before = x.clone()
    got = torch.compile(VERIFIED[name], backend="dicp_cpu", options={"verify": True})(x, w)
    want = VERIFIED[name](before, w)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)

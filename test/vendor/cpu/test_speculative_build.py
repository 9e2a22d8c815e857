"""Templates compile while the core still schedules kernels and plans memory."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dicp.vendor.cpu_graph import speculative_build
from dicp.vendor.cpu_graph.assemble import SegmentWriter
from dicp.vendor.cpu_graph.build import Build, Unit
from dicp.vendor.cpu_graph.claims.common import onednn_has
from dicp.vendor.cpu_graph.expression import STORAGE
from dicp.vendor.cpu_graph.toolchain import cpu_flags

WIDE = "avx512f" in cpu_flags()


class Block(nn.Module):
    """What claims serve by templates: windows of 3, attention, a gated product, one row times a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(64, 64, 3, padding=1)
        self.depth = nn.Conv2d(64, 64, 7, padding=3, groups=64)
        self.qkv, self.up, self.out = nn.Linear(64, 192), nn.Linear(64, 256), nn.Linear(256, 64)
        self.table = nn.Embedding(50, 64)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        rows = F.relu(self.depth(self.conv(x))).flatten(2).transpose(1, 2) + self.table(tokens)
        q, k, v = self.qkv(rows).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.out(F.silu(self.up(mixed))) + self.out(F.silu(self.up(mixed[:, :1])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_what_begins_is_what_the_program_calls(
    training: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    begun, needed, efforts = set[str](), set[str](), dict[str, str]()
    begin, template = Build.begin, SegmentWriter.template

    def noting(self: Build, units: Sequence[Unit]) -> None:
        begun.update(u.source for u in units)
        efforts.update((u.source, u.effort) for u in units)
        begin(self, units)

    def called(self: SegmentWriter, function: str, parameters: str, source: str, *effort: Any) -> str:
        if self.name != "unplanned":
            needed.add(source)
        return template(self, function, parameters, source, *effort)

    ahead: list[Unit] = []
    monkeypatch.setattr(speculative_build, "build", lambda units, config: ahead.extend(units))
    monkeypatch.setattr(Build, "begin", noting)
    monkeypatch.setattr(SegmentWriter, "template", called)
    model = Block().to(dtype)
    x, tokens = torch.randn(2, 64, 16, 16, dtype=dtype), torch.randint(50, (2, 256))
    compiled = torch.compile(model, backend="dicp_cpu", options={"cache_dir": str(tmp_path)})
    with torch.set_grad_enabled(training):
        y = compiled(x, tokens)
    if training:
        y.float().square().mean().backward()
    assert begun == needed and begun
    assert training or {u.source for u in ahead} <= needed  # what layouts turn out to be may be against it
    assert all(efforts.get(u.source, u.effort) == u.effort for u in ahead)
    guessed = {u.name.removesuffix("_bf16").removesuffix("_float") for u in ahead}
    expected = {"flash_attention"}
    if onednn_has(dtype):  # else convolutions and gradients are float32's, which Dynamo's graph does not tell
        expected |= {"winograd", *([f"depthwise_7_{STORAGE[dtype]}_limited"] if WIDE else [])}
        gradients = {"flash_attention_gradient_of", "depthwise_window_gradient"}
        windows = {"winograd_gradient"} if dtype == torch.float32 else set()
        expected |= gradients | windows if training else set()
    assert guessed == expected


@pytest.fixture
def guesses(monkeypatch: pytest.MonkeyPatch) -> tuple[set[str], set[str]]:
    """Names of the units that are compiled ahead, which are not, and of those that programs begin with."""
    torch._dynamo.reset()  # sizes that other tests varied would be symbolic, and nothing guessed
    ahead, begun, begin = set[str](), set[str](), Build.begin

    def noting(self: Build, units: Sequence[Unit]) -> None:
        begun.update(u.name for u in units)
        begin(self, units)

    monkeypatch.setattr(speculative_build, "build", lambda units, config: ahead.update(u.name for u in units))
    monkeypatch.setattr(Build, "begin", noting)
    return ahead, begun


class Step(nn.Module):
    """One token that attends to those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.then, self.small = nn.Linear(256, 256), nn.Linear(256, 256), nn.Linear(256, 8)

    def forward(self, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        q = F.gelu(self.first(x), approximate="tanh").view(1, 4, 1, 64)
        return F.silu(self.small(self.then(F.scaled_dot_product_attention(q, k, k).view(1, 1, 256))))


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_a_step_of_decoding_is_guessed(
    training: bool, guesses: tuple[set[str], set[str]], tmp_path: Any
) -> None:
    """Products of one row by weights that come from memory, with their activations unless gradients need what
    those read, and attention of one row to long keys."""
    ahead, begun = guesses
    model, x, k = Step(), torch.randn(1, 1, 256), torch.randn(1, 4, 1024, 64)
    with torch.set_grad_enabled(training):
        got = torch.compile(model, backend="dicp_cpu", options={"cache_dir": str(tmp_path)})(x, k)
        torch.testing.assert_close(got, model(x, k), rtol=1e-4, atol=1e-4)
    act = set() if training else {"gemv1_float_gelu_tanh"}
    assert ahead == {"gemv1_float_limited", "row_attention_float", *act} == begun


class Gated(nn.Module):
    """Layers of one operand side by side, and one that gates another."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(256, 512), nn.Linear(256, 256), nn.Linear(256, 256)
        self.gate, self.up = nn.Linear(256, 512, bias=False), nn.Linear(256, 512, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.q(x)[:, :256] * self.k(x) * self.v(x)
        return F.silu(F.linear(input=x, weight=self.gate.weight)) * self.up(x)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_layers_of_one_operand_are_guessed(
    training: bool, guesses: tuple[set[str], set[str]], tmp_path: Any
) -> None:
    ahead, begun = guesses
    model, x = Gated(), torch.randn(1, 256)
    with torch.set_grad_enabled(training):
        got = torch.compile(model, backend="dicp_cpu", options={"cache_dir": str(tmp_path)})(x)
        torch.testing.assert_close(got, model(x), rtol=1e-4, atol=1e-4)
    last = "linears2_1_float_limited" if training else "gated_1_float_silu"
    assert ahead == {"linears3_1_float_limited", last} == begun


@pytest.mark.parametrize("what", ["stride", "padding", "padding of rows"])
def test_what_cannot_be_guessed_is_compiled_later(what: str, tmp_path: Any) -> None:
    """A stride or a padding that is computed from a size."""
    w = torch.randn(32, 32, 3, 3)

    def fn(x: torch.Tensor) -> torch.Tensor:
        n = x.shape[2] // 8
        how: dict[str, Any] = {what.split()[0]: (n, 1) if "rows" in what else n}
        return F.conv2d(x, w, **how)

    x = torch.randn(2, 32, 16, 16)
    with torch.no_grad():
        run = torch.compile(fn, backend="dicp_cpu", dynamic=True, options={"cache_dir": str(tmp_path)})
        torch.testing.assert_close(run(x), fn(x), rtol=1e-4, atol=1e-3)


def test_what_fails_ahead_is_said_by_the_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """It is logged, and the compile does it again."""
    torch._dynamo.reset()  # sizes that other tests varied would be symbolic, and nothing guessed
    said = queue.Queue[str]()

    def fail(*_: Any) -> None:
        raise OSError("no room")

    monkeypatch.setattr(speculative_build, "build", fail)
    monkeypatch.setattr(speculative_build.log, "debug", lambda text, *args: said.put(text % args))
    conv, x = nn.Conv2d(64, 64, 3, padding=1), torch.randn(2, 64, 16, 16)
    with torch.no_grad():
        got = torch.compile(conv, backend="dicp_cpu", options={"cache_dir": str(tmp_path)})(x)
        torch.testing.assert_close(got, conv(x), rtol=1e-4, atol=1e-4)
    assert said.get(timeout=60) == "templates were not compiled ahead: no room"

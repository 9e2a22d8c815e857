"""options={"freeze": True}: right by the fp64 rule, folded once, and never with yesterday's weights."""

from __future__ import annotations

import copy
import gc
import logging
import resource
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model.checks import judge
from torch import Tensor, nn

import dicp
from dicp import compat
from dicp.compiler import Compiled, observe
from dicp.runtime.frozen import RESTLESS, Frozen
from dicp.runtime.verification import Verified
from dicp.vendor.cpu_graph.claims import conv_products
from dicp.vendor.cpu_graph.claims.common import multiplies
from dicp.vendor.cpu_graph.packing import pack

FREEZE = {"freeze": True}


class Residual(nn.Module):
    """A block of a ResNet, with a depthwise convolution, and a classifier."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.norm2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, channels, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(channels)
        self.fc = nn.Linear(channels, 5)
        for norm in (self.norm1, self.norm2, self.norm3):
            nn.init.uniform_(norm.weight, 0.5, 2)
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        g = F.relu6(self.norm2(self.conv2(h)))
        h = F.relu(self.norm3(self.conv3(g)) + h)
        return self.fc(h.mean((2, 3)))


class Decoder(nn.Module):
    """A layer of a LLaMA: RMS norms, rotary embeddings from frequencies, grouped heads, a gated MLP."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.Parameter(torch.rand(width) + 0.5) for _ in range(2))
        self.q, self.k, self.v = (nn.Linear(width, width // n, bias=False) for n in (1, 2, 2))
        self.o = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)
        self.register_buffer("frequencies", 100.0 ** -torch.linspace(0, 1, width // heads // 2))

    def rotate(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[2], dtype=self.frequencies.dtype), self.frequencies)
        cos, sin = (torch.cat([t, t], -1).to(x.dtype) for t in (angles.cos(), angles.sin()))
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin

    def forward(self, x: Tensor) -> Tensor:
        def split(t: Tensor) -> Tensor:
            return t.unflatten(-1, (-1, x.shape[-1] // self.heads)).transpose(1, 2)

        h = F.rms_norm(x, x.shape[-1:], self.norm1)
        q, k, v = self.rotate(split(self.q(h))), self.rotate(split(self.k(h))), split(self.v(h))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        h = F.rms_norm(x, x.shape[-1:], self.norm2)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Scaled(nn.Module):
    """Something to fold that needs no compiler to speak of."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.rand(6, 1))
        self.register_buffer("shift", torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.scale, self.shift * 2)


class Watched:
    """A model compiled with frozen weights, held against eager at every call."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.model, self.compiled = model, torch.compile(model, backend="dicp_cpu", options=FREEZE | options)
        self.graphs: list[Compiled] = []

    def __call__(self, *args: Tensor) -> Any:
        with torch.no_grad():
            with observe(self.graphs.append):
                got = self.compiled(*args)
            torch.testing.assert_close(got, self.model(*args), rtol=1e-5, atol=1e-5)
        return got

    @property
    def frozen(self) -> Frozen:
        (graph,) = self.graphs
        call = graph.call.call if isinstance(graph.call, Verified) else graph.call
        assert isinstance(call, Frozen)
        return call

    @property
    def runs(self) -> int:
        """How often the constant program ran."""
        return self.frozen.runs


@pytest.fixture
def scaled() -> Watched:
    return Watched(Scaled().eval())


@pytest.fixture
def said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], list[str]]]:
    """The warnings of dicp since the last call."""

    def take() -> list[str]:
        found = [r.getMessage() for r in caplog.records if r.name.startswith("dicp")]
        caplog.clear()
        return found

    logger = logging.getLogger("dicp")
    monkeypatch.setattr(logger, "propagate", False)  # to the root, where caplog listens too
    logger.addHandler(caplog.handler)
    with caplog.at_level(logging.WARNING, logger="dicp"):
        yield take
    logger.removeHandler(caplog.handler)


def by_the_rule(model: nn.Module, x: Tensor, **options: Any) -> Watched:
    watched = Watched(model.eval(), **options)
    with torch.no_grad(), observe(watched.graphs.append):
        got = [watched.compiled(x) for _ in range(2)]
        assert torch.equal(*got)
        verdict = judge("result", got[0], [model(x)], copy.deepcopy(model).double()(x.double()))
    assert verdict.ok, verdict
    assert watched.runs == 1
    return watched


# -- results


def test_residual_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch norms are gone into the weights, and those are packed."""
    monkeypatch.setattr(conv_products, "halved_by_mkl", lambda: False)  # where it is, the sum's is a product
    watched = by_the_rule(Residual(), torch.randn(2, 3, 12, 12))
    (graph,) = watched.graphs
    assert graph.folding is not None and graph.constants is not None
    calls = [c.claim.name for c in graph.program.library_calls]
    assert len([c for c in calls if c.startswith("conv")]) == 3 and not graph.program.externs
    as_it_is = 3 + calls.count("conv: depthwise")  # which the template reads as it is, where it is ahead
    assert len(graph.folding.frozen) == 16 and graph.folding.forms.count(None) == as_it_is
    assert not any("rsqrt" in str(k.kernel) for k in graph.program.launches)


def test_decoder_layer() -> None:
    watched = by_the_rule(Decoder(), torch.randn(2, 24, 32))
    assert watched.graphs[0].folding is not None
    assert any(
        "cos" in o
        for c in [watched.graphs[0].constants]
        for k in c.program.launches
        for o in k.kernel.origins
    )  # type: ignore[union-attr]


@pytest.mark.parametrize("options", [{"strict": True, "verify": True}, {"max_autotune": True}])
def test_with_other_options(options: dict[str, bool]) -> None:
    by_the_rule(Residual(8), torch.randn(1, 3, 8, 8), **options)


def test_eager_numerics_keep_bits() -> None:
    watched = by_the_rule(Decoder(), torch.randn(1, 8, 32), numerics="eager")
    assert watched.frozen.folding.forms == (None,) * len(watched.frozen.folding.forms)  # packed sums differ


def test_bfloat16() -> None:
    by_the_rule(Residual(8).bfloat16(), torch.randn(1, 3, 8, 8).bfloat16())


def test_autocast_casts_weights_once() -> None:
    model, x = Decoder().eval(), torch.randn(1, 8, 32)
    compiled, graphs = torch.compile(model, backend="dicp_cpu", options=FREEZE), []
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), observe(graphs.append):
        torch.testing.assert_close(compiled(x), model(x), rtol=2e-2, atol=2e-2)
    # bf16, or float32 of bf16's values where the processor has no products of bf16
    folded = [
        t for t in graphs[0].folding.texts if any(size in t for size in ("32,32", "16,32", "64,32", "32,64"))
    ]
    assert len(folded) == 7, graphs[0].folding.texts


def test_sizes_change() -> None:
    watched = Watched(Residual(8).eval())
    for size in ((1, 3, 8, 8), (2, 3, 8, 8), (5, 3, 8, 8), (2, 3, 8, 8)):
        watched(torch.randn(size))
    assert len(watched.graphs) <= 3  # of one size, of some, and at most of some with batch 1
    assert all(graph.call.runs == 1 for graph in watched.graphs)


def test_interpreted_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("DICP_CUDA_INTERPRET", "1")
    model, x = Scaled().eval(), torch.randn(3, 4)
    compiled, graphs = torch.compile(model, backend="dicp_cuda", options=FREEZE), []
    with torch.no_grad(), observe(graphs.append):
        for change in (0, 0, 1):
            if change:
                model.scale.add_(change)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
    assert graphs[0].call.runs == 2 and graphs[0].folding.forms == (None, None)


# -- changed weights

X = torch.linspace(-1, 1, 12).reshape(3, 4)


def in_place(m: Scaled) -> None:
    m.weight.add_(1)


def reading_a_checkpoint(m: Scaled) -> None:
    m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()})


def assigning_a_checkpoint(m: Scaled) -> None:
    m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}, assign=True)


def replacing_a_parameter(m: Scaled) -> None:
    m.weight = nn.Parameter(torch.randn(6, 4))


def setting_data(m: Scaled) -> None:
    m.weight.data = torch.randn(6, 4)


def setting_data_twice(m: Scaled) -> None:
    """The second tensor may lie where the first weight lay, were its memory free."""
    m.weight.data = torch.randn(6, 4)
    m.weight.data = torch.randn(6, 4)


def a_step_of_an_optimizer(m: Scaled) -> None:
    m.weight.grad = torch.ones_like(m.weight)
    torch.optim.SGD(m.parameters(), lr=0.1).step()


def a_fused_step_of_an_optimizer(m: Scaled) -> None:
    """Which torch does not count."""
    m.weight.grad = torch.ones_like(m.weight)
    torch.optim.AdamW(m.parameters(), lr=0.1, fused=True).step()


def a_compiled_fused_step(m: Scaled) -> None:
    with torch.enable_grad():
        m.weight.grad = torch.ones_like(m.weight)
        torch.compile(torch.optim.AdamW(m.parameters(), lr=0.1, fused=True).step, backend="eager")()


def through_a_view(m: Scaled) -> None:
    m.weight.detach()[2:].zero_()


def a_buffer(m: Scaled) -> None:
    m.shift.copy_(torch.randn(6))


def under_inference_mode(m: Scaled) -> None:
    with torch.inference_mode():
        m.scale.mul_(3)


CHANGES = (
    in_place,
    reading_a_checkpoint,
    assigning_a_checkpoint,
    replacing_a_parameter,
    a_fused_step_of_an_optimizer,
    a_compiled_fused_step,
    setting_data,
    setting_data_twice,
    a_step_of_an_optimizer,
    through_a_view,
    a_buffer,
    under_inference_mode,
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_change_is_noticed(change: Callable[[Scaled], None], scaled: Watched, said: Any) -> None:
    before = scaled(X)
    assert scaled.runs == 1
    with torch.no_grad():
        change(scaled.model)  # type: ignore[arg-type]
    assert not torch.equal(scaled(X), before) and scaled.runs == 2
    (line,) = said()
    name = "shift" if change is a_buffer else "scale" if change is under_inference_mode else "weight"
    assert f"{name} " in line and "changed" in line
    scaled(X)
    assert scaled.runs == 2 and not said()


def test_statistics_that_eager_training_writes() -> None:
    """Which torch's batch norm does not count."""
    watched, x = Watched(Residual().eval()), torch.randn(2, 3, 8, 8)
    watched(x)
    before = watched.model.norm1.running_var._version
    with torch.no_grad():
        watched.model.train()(torch.randn(4, 3, 8, 8) * 5 + 2)
    watched.model.eval()
    assert watched.model.norm1.running_var._version == before
    watched(x)
    assert watched.runs == 2
    watched(x)
    assert watched.runs == 2


def test_packed_weights_too() -> None:
    watched, x = Watched(nn.Linear(8, 8).eval()), torch.randn(32, 8)
    watched(x)
    if watched.graphs[0].folding is None:
        pytest.skip("this machine's linear layers go to a library that takes weights as they are")
    with torch.no_grad():
        watched.model.weight.mul_(2)
    watched(x)
    assert watched.runs == 2


def test_packed_memory_goes() -> None:
    """With what stands for it: the program's handle is given back."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("oneDNN's formats")
    weight, form = torch.randn(1024, 1024), repr(("linear", 64))

    def peak_after(packs: int) -> int:
        for _ in range(packs):
            pack(weight, form)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = peak_after(3)
    assert peak_after(60) - before < 60 << 10  # KiB; all of them would be 240 MiB


@pytest.mark.parametrize("rows, packed", [(1, False), (64, True)])
def test_few_rows_read_weights_as_they_are(rows: int, packed: bool) -> None:
    """At memory speed, which packing would not raise, for twice the memory."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("oneDNN's formats")
    model, x = nn.Linear(512, 512).bfloat16().eval(), torch.randn(rows, 512).bfloat16()
    graphs: list[Compiled] = []
    with torch.no_grad(), observe(graphs.append):
        got = torch.compile(model, backend="dicp_cpu", options=FREEZE)(x)
        verdict = judge("result", got, [model(x)], copy.deepcopy(model).double()(x.double()))
    assert verdict.ok, verdict
    # without instructions for bf16 our tiles read the weight as it is
    assert (graphs[0].folding is not None) is (packed and multiplies(torch.bfloat16))


class Turned(nn.Module):
    """A layer of GPT-2: weights of [inputs, outputs]."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(512, 384) / 20)
        self.bias = nn.Parameter(torch.randn(384)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, 512)
        y = rows @ self.weight if self.bias is None else torch.addmm(self.bias, rows, self.weight)
        return y.reshape(*x.shape[:-1], 384)


@pytest.mark.parametrize("bias", [False, True])
def test_weights_by_columns_are_packed(bias: bool) -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("oneDNN's formats")
    model, x = Turned(bias).bfloat16().eval(), torch.randn(2, 32, 512).bfloat16()
    compiled = torch.compile(model, backend="dicp_cpu", options=FREEZE)
    graphs: list[Compiled] = []
    for _ in range(2):
        with torch.no_grad(), observe(graphs.append):
            got = compiled(x)
            verdict = judge("result", got, [model(x)], copy.deepcopy(model).double()(x.double()))
            model.weight.mul_(2)
        assert verdict.ok, verdict
    folding = graphs[0].folding
    # without instructions for bf16 our tiles read the weight as it is
    assert (folding is not None and any(folding.forms)) is multiplies(torch.bfloat16)


def test_large_results_are_written_where_results_are_kept() -> None:
    """oneDNN would return memory of its own for a packed weight, mapped anew in each call."""
    model, x = nn.Linear(128, 1 << 16).eval(), torch.randn(160, 128)
    graphs: list[Compiled] = []
    with torch.no_grad(), observe(graphs.append):
        got = torch.compile(model, backend="dicp_cpu", options=FREEZE)(x)
        torch.testing.assert_close(got, model(x), rtol=1e-4, atol=1e-4)
    (call,) = graphs[0].program.library_calls
    assert call.claim.out


def test_half_compiles_again(scaled: Watched) -> None:
    scaled(X)
    model = scaled.model.half()
    with torch.no_grad():
        torch.testing.assert_close(scaled.compiled(X.half()), model(X.half()), rtol=1e-2, atol=1e-2)


def test_compiled_graph_that_writes_a_weight() -> None:
    """Written by generated code of another graph: batch norm's statistics, under no_grad."""
    norm = nn.BatchNorm1d(4)
    watched = Watched(nn.Sequential(nn.Linear(4, 4), norm).eval())
    train = torch.compile(norm, backend="dicp_cpu", options=FREEZE)
    watched(X)
    with torch.no_grad():
        train(torch.randn(9, 4)) if norm.train() else None
    norm.eval()
    watched(X)


def test_graph_that_writes_its_own_weight() -> None:
    class Counting(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            self.shift.add_(1)
            return super().forward(x)

    model = Counting().eval()
    twin = copy.deepcopy(model)
    compiled, graphs = torch.compile(model, backend="dicp_cpu", options=FREEZE), []
    with torch.no_grad(), observe(graphs.append):
        for _ in range(3):
            torch.testing.assert_close(compiled(X), twin(X), rtol=1e-5, atol=1e-5)
    assert graphs[0].call.runs == 1 and len(graphs[0].folding.frozen) == 2


def test_through_data_only_refresh_tells(scaled: Watched) -> None:
    """The contract's gap, and the way round it."""
    scaled(X)
    scaled.model.weight.data.mul_(2)
    with torch.no_grad():
        assert not torch.allclose(scaled.compiled(X), scaled.model(X))
    dicp.refresh_frozen()
    scaled(X)
    assert scaled.runs == 2
    scaled.model.weight.data.mul_(2)
    torch.autograd.graph.increment_version(scaled.model.weight)
    scaled(X)


def test_weights_without_versions(said: Any) -> None:
    with torch.inference_mode():
        model = Scaled().eval()
    watched = Watched(model)
    for k in range(3):
        with torch.inference_mode():
            model.weight.add_(k)
            torch.testing.assert_close(watched.compiled(X), model(X), rtol=1e-5, atol=1e-5)
    assert len(said()) == 1


def test_warns_where_weights_never_rest(scaled: Watched, said: Any) -> None:
    for _ in range(RESTLESS + 3):
        with torch.no_grad():
            scaled.model.weight.add_(1)
        scaled(X)
    assert len([line for line in said() if "only costs" in line]) == 1


# -- one graph, several modules; several graphs, one module


def test_one_graph_for_many_layers(said: Any) -> None:
    layers = nn.ModuleList(Scaled() for _ in range(RESTLESS + 2)).eval()
    graphs: list[Compiled] = []
    for layer in layers:
        layer.compile(backend="dicp_cpu", options=FREEZE)
    with torch.no_grad(), observe(graphs.append):
        for _ in range(3):
            for layer in layers:
                torch.testing.assert_close(layer(X), layer.forward(X), rtol=1e-5, atol=1e-5)
        layers[3].weight.add_(1)
        torch.testing.assert_close(layers[3](X), layers[3].forward(X), rtol=1e-5, atol=1e-5)
    assert sum(g.call.runs for g in graphs) == len(layers) + 1 and len(graphs) == 1
    assert len(said()) == 1


def test_two_functions_of_one_module() -> None:
    model = Scaled().eval()
    one, two = (
        Watched(model),
        torch.compile(lambda x: model(x) + model.weight.sum(), backend="dicp_cpu", options=FREEZE),
    )
    for k in range(2):
        with torch.no_grad():
            model.scale.add_(k)
            one(X)
            torch.testing.assert_close(two(X), model(X) + model.weight.sum(), rtol=1e-5, atol=1e-5)


def test_memory_goes_with_the_weights(scaled: Watched) -> None:
    scaled(X)
    (kept,) = scaled.frozen._kept.values()
    value, weight = weakref.ref(kept.values[0]), weakref.ref(scaled.model.weight)
    del kept
    scaled.model = scaled.compiled = None  # type: ignore[assignment]
    torch._dynamo.reset()
    gc.collect()
    assert weight() is None and value() is None


def test_results_are_the_callers(scaled: Watched) -> None:
    class Returning(Scaled):
        def forward(self, x: Tensor) -> Any:
            folded = self.weight * self.scale
            return F.linear(x, folded), folded.t(), self.shift

    model = Returning().eval()
    compiled = torch.compile(model, backend="dicp_cpu", options=FREEZE)
    with torch.no_grad():
        for t in compiled(X)[:2]:
            t.zero_()
        got, wanted = compiled(X), model(X)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
        assert got[2] is model.shift


# -- training, reports, caches


def test_gradients_are_computed_and_freeze_says_so(scaled: Watched) -> None:
    with pytest.warns(UserWarning, match="freeze does nothing"):
        scaled.compiled(X).sum().backward()
    assert scaled.model.weight.grad is not None


def test_explain_tells() -> None:
    with torch.no_grad():
        found = dicp.explain(Scaled().eval(), X, options=FREEZE)
    (graph,) = found.graphs
    assert graph.folded == ["mul f32[6,4]", "mul f32[6]"] and graph.folded_bytes == 4 * 30
    assert "frozen: 2 values made of 3 weights, 120 bytes" in str(found)


def test_dump(tmp_path: Path) -> None:
    with torch.no_grad():
        torch.compile(Scaled().eval(), backend="dicp_cpu", options=FREEZE | {"dump": str(tmp_path)})(X)
    main, constants = sorted(tmp_path.iterdir())
    assert "folded0" in (main / "29_split.txt").read_text() and (constants / "call.py").exists()


def test_second_compile_comes_from_the_cache(scaled: Watched, said: Any) -> None:
    """Of the weights nothing is stored: another model's fit as well."""
    with torch.no_grad():
        scaled.compiled(X)
        torch._dynamo.reset()
        before = compat.counters()["graphs_loaded"]
        model = Scaled().eval()
        again = torch.compile(model, backend="dicp_cpu", options=FREEZE)
        for k in range(2):
            model.scale.add_(k)
            torch.testing.assert_close(again(X), model(X), rtol=1e-5, atol=1e-5)
        assert compat.counters()["graphs_loaded"] == before + 1
        (line,) = said()
        assert "scale changed" in line
        torch._dynamo.reset()
        torch.testing.assert_close(
            torch.compile(model, backend="dicp_cpu")(X), model(X), rtol=1e-5, atol=1e-5
        )
        assert compat.counters()["graphs_loaded"] == before + 1


def test_file(tmp_path: Path) -> None:
    model, x = Residual(8).eval(), torch.randn(2, 3, 8, 8)
    with torch.no_grad(), torch._dynamo.config.patch(enable_aot_compile=True):
        compiled = torch.compile(model.forward, backend="dicp_cpu", options=FREEZE, fullgraph=True)
        compiled.aot_compile(((x,), {})).save_compiled_function(str(tmp_path / "f"))
        torch._dynamo.reset()
        with open(tmp_path / "f", "rb") as file:
            f = torch.compiler.load_compiled_function(file)
        for k in range(2):
            model.conv1.weight.add_(k)
            torch.testing.assert_close(f(model, x), model(x), rtol=1e-5, atol=1e-5)

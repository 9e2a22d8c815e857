"""Compiled graphs in torch's caches and in files: fresh processes use them without compiling, and no key or
file is taken for another's."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dicp
from dicp.config import Config
from dicp.dynamo_bridge import saved
from dicp.errors import CacheError
from dicp.runtime import artifact
from dicp.vendor.cpu_graph import build

# -- fresh processes

PROGRAM = """
import os, sys, torch
from torch import nn
task, folder = sys.argv[1:]
at = lambda name: os.path.join(folder, name)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))

    def forward(self, x, keep):
        y = self.layers(x).softmax(-1)
        return y, x[keep]  # a size that only the data tells: an extern call

torch._dynamo.config.capture_dynamic_output_shape_ops = True
torch._dynamo.config.enable_aot_compile = True  # off in 2.11
torch._dynamo.config.caching_precompile = "precompile" in task
model = Model()
torch.manual_seed(1)
x, keep = torch.randn(8, 16), torch.arange(8) % 3 == 0

def use(f):
    with torch.no_grad():
        first = f(x, keep)
    y, chosen = f(x, keep)
    (y.square().sum() + chosen.sum()).backward()
    return [*first, y.detach(), chosen.detach(), *(p.grad for p in model.parameters())]

if task == "load":
    assert torch.compiler.load_cache_artifacts(open(at("artifacts"), "rb").read()) is not None
if task == "open":
    with open(at("function"), "rb") as file:
        f = torch.compiler.load_compiled_function(file)
    y, chosen = f(model, x, keep)
    y.square().sum().backward()
    got = [y.detach(), chosen, *(p.grad for p in model.parameters())]
else:
    got = use(torch.compile(model, backend="dicp_cpu"))
if task in ("fill", "precompile fill"):
    data, _ = torch.compiler.save_cache_artifacts()
    open(at("artifacts"), "wb").write(data)
    torch.save(got, at("results"))
if task == "fill":
    torch._dynamo.reset()
    model.zero_grad()
    f = torch.compile(model.forward, backend="dicp_cpu", fullgraph=True).aot_compile(((x, keep), {}))
    f.save_compiled_function(at("function"))
    y, chosen = f(model, x, keep)
    y.square().sum().backward()
    torch.save([y.detach(), chosen, *(p.grad for p in model.parameters())], at("results of the function"))
else:
    wanted = torch.load(at("results of the function" if task == "open" else "results"))
    assert len(got) == len(wanted) and all(torch.equal(a, b) for a, b in zip(got, wanted)), "not bitwise equal"
if task == "use" and torch.__version__ >= "2.13":
    assert "torch._inductor.lowering" not in sys.modules  # a second of imports that a warm start does without
from torch._dynamo.utils import counters
print(counters["dicp"]["graphs"], counters["dicp"]["graphs_loaded"], counters["stats"]["unique_graphs"])
"""


def process(task: str, folder: Path, caches: Path, compiler: bool = False) -> list[int]:
    """Graphs that dicp compiled, graphs that it loaded, and graphs that Dynamo traced."""
    env = {**os.environ, "DICP_CACHE_DIR": str(caches / "kernels"), "TORCHINDUCTOR_CACHE_DIR": str(caches / "torch")}
    env.pop("CXX", None)
    if not compiler:
        env["PATH"] = str(folder / "nothing")
    script = folder / "program.py"
    script.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(script), task, str(folder)], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return [int(n) for n in done.stdout.split()]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(folder of files, caches) that a first process wrote."""
    folder, caches = tmp_path_factory.mktemp("files"), tmp_path_factory.mktemp("caches")
    compiled, _, traced = process("fill", folder, caches, compiler=True)
    assert compiled >= 3 and traced >= 2
    return folder, caches


def test_warm_process_compiles_nothing(filled: tuple[Path, Path]) -> None:
    compiled, loaded, _ = process("use", *filled)
    assert (compiled, loaded) == (0, 3)


def test_artifacts_of_torch_carry_everything(filled: tuple[Path, Path], tmp_path: Path) -> None:
    compiled, loaded, _ = process("load", filled[0], tmp_path)
    assert (compiled, loaded) == (0, 3)


def test_saved_function_runs_without_a_compiler(filled: tuple[Path, Path], tmp_path: Path) -> None:
    """Forward and backward, bitwise equal, with empty caches."""
    assert process("open", filled[0], tmp_path) == [0, 2, 0]


def test_caching_precompile_skips_dynamo(tmp_path: Path) -> None:
    process("precompile fill", tmp_path, tmp_path, compiler=True)
    assert process("precompile use", tmp_path, tmp_path) == [0, 3, 0]


# -- the key


def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.gelu(x @ w).softmax(-1)


@pytest.fixture
def arguments() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(6, 5), torch.randn(5, 7)


def run(args: Any, fn: Callable[..., Any] = model, grad: bool = False, **given: Any) -> Counter[str]:
    """Compile as a fresh process would, check the result; "hit", "miss" and "saved" counts, and dicp's."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    args = [a.detach().clone().requires_grad_(grad) for a in args]
    y = torch.compile(fn, backend="dicp_cpu", **given)(*args)
    torch.testing.assert_close(y, fn(*args))
    if grad:
        y.sum().backward()
    found = {k.removeprefix("autograd_cache_"): v for k, v in counters["aot_autograd"].items()}
    return Counter(found | {"loaded": counters["dicp"]["graphs_loaded"]} | counters["dicp"])


def hit(found: Counter[str]) -> bool:
    assert found["hit"] + found["miss"] == 1, found
    return bool(found["hit"])


@pytest.mark.parametrize("grad", [False, True])
def test_second_compile_hits(arguments: Any, grad: bool, caplog: pytest.LogCaptureFixture) -> None:
    first = run(arguments, grad=grad)
    assert not hit(first) and first["saved"] == 1
    with caplog.at_level(logging.INFO, logger="dicp"):
        second = run(arguments, grad=grad)
    assert hit(second) and second["loaded"] == 1 + grad
    assert all(second[what] == first[what] > 0 for what in ("kernels", "library")), "of what was loaded too"
    assert ["not compiled" in x.message for x in caplog.records if x.name == "dicp"] == [True] * (1 + grad)


@pytest.mark.parametrize("grad", [False, True])
def test_no_compile_needs_the_key_of_torch(
    grad: bool, arguments: Any, own_torch_caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._functorch._aot_autograd import autograd_cache

    if not hasattr(autograd_cache.AOTAutogradCacheDetails, "_init_fx_graph_hash_details"):
        pytest.skip("torch 2.13 and later")
    monkeypatch.setattr(autograd_cache, "autograd_cache_key", None)
    first = run(arguments, grad=grad)
    assert not hit(first) and first["saved"] == 1
    found = run(arguments, grad=grad)
    assert hit(found) and found["loaded"] == 1 + grad
    assert not run(arguments, lambda x, w: x @ w + 1)["loaded"]


def test_shortcut_that_leads_elsewhere_is_not_taken(arguments: Any, own_torch_caches: Path) -> None:
    other = lambda x, w: (x @ w).sigmoid()  # noqa: E731
    run(arguments)
    run(arguments, other)
    shortcuts = sorted((own_torch_caches / "dicp").glob("*"))
    texts = [path.read_text() for path in shortcuts]
    for path, text in zip(shortcuts, reversed(texts)):
        path.write_text(text)
    assert hit(run(arguments)) and hit(run(arguments, other))  # by the other key, and results are compared
    assert [path.read_text() for path in shortcuts] == texts
    for rubbish in (b"", b"\xff rubbish", b"../" * 20):
        for path in shortcuts:
            path.write_bytes(rubbish)
        assert hit(run(arguments)) and hit(run(arguments, other))


def test_what_another_machine_stored_is_found(
    arguments: Any, own_torch_caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._functorch._aot_autograd import autograd_cache

    from dicp.compat import autograd

    if not hasattr(autograd_cache.AOTAutogradCacheDetails, "_init_fx_graph_hash_details"):
        pytest.skip("torch 2.13 and later")
    run(arguments)
    monkeypatch.setattr(autograd, "_torch_files", lambda: "the same sources, written at another time")
    assert hit(run(arguments)) and hit(run(arguments))
    assert len(list((own_torch_caches / "dicp").glob("*"))) == 1
    other = lambda: b"other sources"  # noqa: E731
    monkeypatch.setattr("torch._inductor.codecache.torch_key", other)
    assert not hit(run(arguments))


def _other(attribute: str) -> Callable[[pytest.MonkeyPatch], dict[str, Any]]:
    def change(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        if attribute == "version":
            monkeypatch.setattr(dicp, "__version__", "0.1.1")
            build.toolchain.environment_parts.cache_clear()
        elif attribute == "sources":
            monkeypatch.setattr(saved, "sources_digest", lambda: "other")
        elif attribute == "toolchain":
            monkeypatch.setattr(build, "compiler_identity", lambda config: "g++ 99 | x86_64-linux-gnu")
        elif attribute == "threads":
            monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
        return {"options": {"numerics": "eager"}} if attribute == "option" else {}

    return change


@pytest.mark.parametrize("what", ["version", "sources", "toolchain", "threads", "option"])
def test_key_knows(what: str, arguments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run(arguments)
    with monkeypatch.context() as changes:
        assert not hit(run(arguments, **_other(what)(changes)))
    build.toolchain.environment_parts.cache_clear()
    assert hit(run(arguments))


def test_key_knows_the_vendor(arguments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from dicp.vendor import get

    class Another(type(get("cpu_graph"))):  # type: ignore[misc]
        name = "another"

    run(arguments)
    monkeypatch.setattr("dicp.dynamo_bridge.backend._vendor", lambda name: Another())
    assert not hit(run(arguments))


def test_users_own_tag_stays(arguments: Any) -> None:
    with torch.compiler.config.patch(cache_key_tag="mine"):
        run(arguments)
        assert torch.compiler.config.cache_key_tag == "mine"
    assert not hit(run(arguments))


def test_settings_are_as_before(arguments: Any) -> None:
    """Also after a backward, whose compile leaves a setting on until its first call."""
    from torch._functorch import config

    before = config.bundled_autograd_cache, config.donated_buffer, torch.compiler.config.cache_key_tag
    run(arguments, grad=True)
    assert before == (config.bundled_autograd_cache, config.donated_buffer, torch.compiler.config.cache_key_tag)


def test_not_stored(arguments: Any) -> None:
    found = run(arguments, options={"verify": True})
    assert not found["saved"] and not found["miss"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_inputs_that_share_memory_are_compiled_each(dynamic: bool, own_torch_caches: Path) -> None:
    """torch guards which do, and its key does not know: what comes from the cache was made for others."""

    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return b * 2

    whole, larger = torch.zeros(8), torch.zeros(100)
    for a, b in (
        (torch.zeros(4), torch.zeros(4)),
        (whole[:4], whole[2:6]),
        (torch.zeros(4), torch.zeros(4)),
        (larger[50:54], larger[52:56]),
        (whole[2:6], whole[2:6]),
    ):
        torch._dynamo.reset()
        before = [t.clone() for t in (a, b)]
        got = torch.compile(f, backend="dicp_cpu", dynamic=dynamic)(a, b)
        torch.testing.assert_close(a, before[0] + 1)
        torch.testing.assert_close(got, b * 2)


def test_operators_of_the_users_own_are_compiled_each(own_torch_caches: Path) -> None:
    """Their gradients are traced into what is stored, and the key knows their names alone."""

    @torch.library.custom_op("dicp_test_saved::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    for slope in (3.0, 2.0):  # a mistake, and its correction
        twice.register_autograd(lambda ctx, grad, slope=slope: grad * slope)
        torch._dynamo.reset()
        x = torch.ones(3, requires_grad=True)
        torch.compile(lambda x: twice(x).sum(), backend="dicp_cpu")(x).backward()
        assert x.grad.eq(slope).all()


def test_packages_of_operators_are_in_the_tag() -> None:
    class Calls(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.numpy.dicp_test(x) if hasattr(torch.ops.numpy, "dicp_test") else x

    lib = torch.library.Library("numpy", "FRAGMENT")  # as if that package had an operator
    lib.define("dicp_test(Tensor x) -> Tensor")
    found = saved.packages(torch.fx.symbolic_trace(Calls()))
    import numpy

    assert found == {"numpy": numpy.__version__}
    from dicp.vendor.cpu_graph import CpuGraph

    vendor, config = CpuGraph(), Config.make()
    assert saved.cache_tag(vendor, config, found) != saved.cache_tag(vendor, config, {"numpy": "1"})


def test_the_sources_of_a_vendors_package_are_in_the_tag(tmp_path: Path, monkeypatch: Any) -> None:
    text = "from dicp.vendor.cpu_graph import CpuGraph\nclass Chip(CpuGraph):\n    name = 'chip'\n"
    monkeypatch.syspath_prepend(str(tmp_path))
    tags = set()
    for number in range(2):  # two states of one package, as two processes see them
        name = f"chip{number}_of_the_tests"
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
        (tmp_path / name / "emit.py").write_text(f"WORD = {number}\n")
        tags.add(saved.cache_tag(importlib.import_module(name).Chip(), Config.make()))
    assert len(tags) == 2


def test_the_tag_knows_which_kernels_of_attention_are_allowed() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from dicp.vendor.cpu_graph import CpuGraph

    with sdpa_kernel(SDPBackend.MATH):
        math = saved.cache_tag(CpuGraph(), Config.make())
    assert math != saved.cache_tag(CpuGraph(), Config.make())


def test_floats_that_vary_are_compiled_each(own_torch_caches: Path) -> None:
    """Tracing settles what they are, with a guard; from the cache came one's program without it, for another."""
    for values in ((0.5, -1.5, 2.0), (7.0, 8.0)):
        torch._dynamo.reset()  # the second time as a process that finds what the first has left
        run = torch.compile(lambda x, a: (x + a, a * 2, x.clamp(max=a)), backend="dicp_cpu")
        for a in values:
            x = torch.full((2,), 3.0)
            y, twice, least = run(x, a)
            assert (y[0].item(), twice, least[0].item()) == (3 + a, 2 * a, min(3.0, a))


def test_watched_compiles_are_compiles(arguments: Any) -> None:
    from dicp.compiler import observe

    run(arguments)
    graphs: list[Any] = []
    with observe(graphs.append):
        assert not run(arguments)["hit"]
    assert len(graphs) == 1


def test_retain_graph_whoever_filled_the_cache(arguments: Any) -> None:
    run(arguments, grad=True)  # without retain_graph
    torch._dynamo.reset()
    args = [a.detach().clone().requires_grad_() for a in arguments]
    y = torch.compile(model, backend="dicp_cpu")(*args).sum()
    y.backward(retain_graph=True)
    once = args[0].grad.clone()
    y.backward()
    torch.testing.assert_close(args[0].grad, 2 * once)


# -- damage and strangers


def entries(caches: Path) -> Iterator[Path]:
    yield from [p for p in (caches / "aotautograd").rglob("*") if p.is_file()]


def test_damaged_entries_are_misses(arguments: Any, own_torch_caches: Path) -> None:
    run(arguments)
    (entry,) = entries(own_torch_caches)
    sound = entry.read_bytes()
    mine = pickle.loads(sound).compiled_fw.result.artifact
    start = sound.index(mine)
    flipped = range(start, start + len(mine), len(mine) // 7)
    texts = [sound[:at] + bytes([sound[at] ^ 16]) + sound[at + 1 :] for at in flipped]
    for text in (*texts, b"", sound[: len(sound) // 2], b"rubbish"):
        for path in entries(own_torch_caches):
            path.unlink()
        entry.write_bytes(text)
        assert not hit(run(arguments))


def _artifact() -> bytes:
    from dicp.compiler import observe

    found: list[Any] = []
    with observe(found.append):
        torch.compile(lambda x: x.sin() + 1, backend="dicp_cpu")(torch.ones(3))
    return found[0].program.save().to_bytes()  # type: ignore[no-any-return]


def test_artifact_of_another_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = _artifact()
    assert saved.load(data, None, Config.make())([torch.zeros(3)])[0].tolist() == [1, 1, 1]
    with monkeypatch.context() as changes:
        changes.setattr(torch, "__version__", "9.9.9")
        with pytest.raises(CacheError, match="made with torch .* and this is torch 9.9.9"):
            pickle.loads(pickle.dumps(saved.SavedGraph(None, data)))
    other = artifact.Artifact.from_bytes(data)
    other = dataclasses.replace(other, requires={**other.requires, "cpu": "avx2048"})
    with pytest.raises(CacheError, match="avx2048"):
        saved.load(other.to_bytes(), None, Config.make())


def test_units_of_another_machine_are_placed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unit = artifact.Artifact.from_bytes(_artifact()).units[0]
    monkeypatch.setenv("DICP_CACHE_DIR", str(tmp_path))
    folder = artifact.place_unit(unit.to_bytes())
    assert folder.name == unit.key.digest and folder.is_relative_to(tmp_path)
    assert artifact.place_unit(unit.to_bytes()) == folder
    with pytest.raises(CacheError, match="damaged"):
        artifact.place_unit(unit.to_bytes()[:-1])


def test_what_cannot_be_pickled_is_not_stored(arguments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(values: Any) -> bytes:
        raise artifact.NotSaveable("a lock")

    monkeypatch.setattr(artifact, "_dump", refuse)
    found = run(arguments)
    assert not found["saved"] and found["bypass"] == 1



"""The chooser: the heuristic's choice by default, the measured one under max_autotune, measured once."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import graph_of

from dicp import cache as cli
from dicp.compiler import Compiled, observe
from dicp.config import Config
from dicp.dynamo_bridge.saved import cache_tag
from dicp.errors import DicpError
from dicp.runtime.cache import Store, open_store
from dicp.tuning import timing
from dicp.tuning.choose import candidates, choose_claims, decided
from dicp.tuning.costs import Costs, key_of, measured, recorded
from dicp.tuning.one_call import describe, one_call
from dicp.vendor.base import Claim
from dicp.vendor.cpu_graph import vendor as cpu

X, W = torch.randn(2, 300), torch.randn(512, 300)


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w.t()


class Timer:
    """In place of the clock: the later a candidate is offered, the faster it seems."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def __call__(self, calls: Any, sets: Any, elapsed: Any) -> dict[str, float]:
        assert elapsed(lambda: None) >= 0
        self.calls.append(list(calls))
        return {name: 1e-3 / (k + 1) for k, name in enumerate(calls)}


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Timer]:
    made = Timer()
    monkeypatch.setattr(timing, "time_calls", made)
    yield made


def chosen(fn: Callable[..., Any], *args: Any, mode: str | None = None, **how: Any) -> list[str]:
    """Names of the claims of the compiled function's calls; its result is eager's."""
    torch._dynamo.reset()
    seen: list[Compiled] = []
    with observe(seen.append):
        got = torch.compile(fn, backend="dicp_cpu", mode=mode, **how)(*args)
    torch.testing.assert_close(got, fn(*args), atol=1e-4, rtol=1e-4)
    return [c.claim.name for s in seen for c in s.program.library_calls]


def names(config: Config) -> list[str]:
    """Candidates for the product's one call."""
    gm = graph_of(product, X, W)
    (node,) = (n for n in gm.graph.nodes if n.target is torch.ops.aten.mm.default)
    return [c.name for c in candidates(cpu, node, config)]


def store() -> Store:
    return open_store(Config.make())


def test_default_is_the_heuristic_whatever_was_measured(timer: Timer) -> None:
    first = chosen(product, X, W)
    assert chosen(product, X, W, mode="max-autotune") != first and len(timer.calls) == 1
    assert chosen(product, X, W) == first and len(timer.calls) == 1
    assert first[0].endswith("few rows")


def test_eager_numerics_keep_the_call_of_eager(timer: Timer) -> None:
    options = {"numerics": "eager", "max_autotune": True}
    assert names(Config.make(None, options)) == ["mm: BLAS"]
    assert chosen(product, X, W, options=options) == ["mm: BLAS"] and not timer.calls


def test_the_record_decides_and_nothing_is_measured_twice(timer: Timer) -> None:
    (choice,) = chosen(product, X, W, mode="max-autotune")
    assert choice == timer.calls[0][-1]
    assert chosen(product, X, W, options={"max_autotune": True}) == [choice]
    assert chosen(lambda x, w: x @ w.t() + 0 * x.sum(), X, W, mode="max-autotune")[-1] == choice
    assert len(timer.calls) == 1, "costs on record were measured again"


def test_equal_calls_of_a_graph_are_measured_once(timer: Timer) -> None:
    a, b = torch.randn(2, 300, 512)
    found = chosen(lambda x, a, b: torch.stack([x @ a, x @ b]), X, a, b, mode="max-autotune")
    assert len(found) == 2 and len(set(found)) == 1 and len(timer.calls) == 1


def entry() -> Path:
    (found,) = (e for e in store().entries() if (e / "costs.json").exists())
    return found


@pytest.mark.parametrize("damage", ["text", "missing", "cut"])
def test_a_damaged_record_is_measured_again(timer: Timer, damage: str) -> None:
    choice = chosen(product, X, W, mode="max-autotune")
    file = entry() / "costs.json"
    if damage == "missing":
        file.unlink()
    else:
        file.write_text("{" if damage == "text" else file.read_text()[:-3])
    assert chosen(product, X, W, mode="max-autotune") == choice and len(timer.calls) == 2
    assert json.loads((entry() / "costs.json").read_text())["choice"] == choice[0]


def test_without_compiling_there_is_the_record_or_the_heuristic(timer: Timer) -> None:
    gm = graph_of(product, X, W)
    config = Config.make(None, {"max_autotune": True, "no_compile": True})

    def no_build(*_: Any) -> Any:
        raise AssertionError("built")

    (claim,) = choose_claims(gm, cpu, config, no_build).values()
    assert claim.name == "mm: few rows" and not timer.calls
    (claim,) = choose_claims(gm, cpu, Config.make("max-autotune"), lambda *_: list).values()
    assert claim.name == timer.calls[0][-1] != "mm: few rows"
    assert next(iter(choose_claims(gm, cpu, config, no_build).values())).name == claim.name


def test_a_candidate_that_fails_is_not_taken(timer: Timer, caplog: pytest.LogCaptureFixture) -> None:
    gm = graph_of(product, X, W)
    *_, last = names(Config.make())

    def build(one: Any, claims: dict[Any, Claim]) -> Any:
        if next(iter(claims.values())).name == last:
            raise DicpError("no such call")
        return list

    with caplog.at_level(logging.INFO, logger="dicp.tuning"):
        (claim,) = choose_claims(gm, cpu, Config.make("max-autotune"), build).values()
    assert claim.name == timer.calls[0][-1] != last
    assert "no such call" in caplog.text and f"{last} failed" in caplog.text

    def none(one: Any, claims: Any) -> Any:
        raise DicpError("nothing works")

    gm = graph_of(lambda x, w: x @ w, torch.randn(3, 300), torch.randn(300, 512))
    (claim,) = choose_claims(gm, cpu, Config.make("max-autotune"), none).values()
    assert claim.name == "mm: few rows"


def test_a_candidate_that_computes_something_else_is_not_taken(
    timer: Timer, caplog: pytest.LogCaptureFixture
) -> None:
    gm = graph_of(product, X, W)
    *_, last = names(Config.make())

    def build(one: Any, claims: dict[Any, Claim]) -> Any:
        wrong = next(iter(claims.values())).name == last
        return lambda args: [torch.full((2, 512), 7.0) if wrong else args[0] @ args[1]]

    with caplog.at_level(logging.WARNING, logger="dicp.tuning"):
        (claim,) = choose_claims(gm, cpu, Config.make("max-autotune"), build).values()
    assert claim.name != last and last not in timer.calls[0]
    assert f"{last} gives other results than" in caplog.text


def test_a_candidate_may_raise_anything(timer: Timer) -> None:
    gm = graph_of(product, X, W)
    *_, last = names(Config.make())

    def build(one: Any, claims: dict[Any, Claim]) -> Any:
        if next(iter(claims.values())).name == last:
            raise KeyError("a vendor's")
        return list

    (claim,) = choose_claims(gm, cpu, Config.make("max-autotune"), build).values()
    assert claim.name == timer.calls[0][-1] != last


def test_programs_compiled_after_measuring_are_kept_apart() -> None:
    tags = {cache_tag(cpu, Config.make(mode)) for mode in ("default", "max-autotune-no-cudagraphs")}
    assert len(tags) == 2


def test_a_little_faster_is_noise() -> None:
    assert decided({"a": 1.0, "b": 0.97}).choice == "a"
    assert decided({"a": 1.0, "b": 0.9, "c": 0.8}).choice == "c"
    assert decided({"a": None, "b": 2.0}) == Costs({"a": None, "b": 2e6}, "b")


def test_processes_and_threads_measure_once() -> None:
    key = key_of("call", ["a", "b"], "v", "d", 2)
    count: list[int] = []

    def measure() -> Costs:
        count.append(1)
        return Costs({"a": 1.0, "b": 2.0}, "a")

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: measured(store(), key, measure), range(16)))
    assert set(map(Costs.text, found)) == {"a 1.0 us, b 2.0 us: a"} and len(count) == 1
    assert recorded(store(), key_of("call", ["a", "b"], "v", "d", 1)) is None  # of other threads


def test_calls_as_text() -> None:
    def text(fn: Any, *args: Any, target: str = "mm", **how: Any) -> str:
        gm = graph_of(fn, *args, **how)
        return next(describe(n) for n in gm.graph.nodes if target in str(n.target))

    assert text(product, X, W) == "aten.mm(f32[2,300], f32[300,512]'(1,300))"
    bias = torch.randn(512)
    assert text(torch.addmm, bias, X, W.t().contiguous(), target="addmm").startswith("aten.addmm(f32[512], ")
    varying = text(product, torch.randn(100, 300), W, dynamic=True)
    assert varying == "aten.mm(f32[~128,~512], f32[~512,~512]@10)"


def test_one_call_stands_for_a_node() -> None:
    gm = graph_of(product, torch.randn(100, 300), W, dynamic=True)
    node = next(n for n in gm.graph.nodes if n.target is torch.ops.aten.mm.default)
    one, call = one_call(node)
    vals = [n.meta["val"] for n in call.all_input_nodes]
    assert [(tuple(v.shape), v.stride()) for v in vals] == [((100, 300), (300, 1)), ((300, 512), (1, 300))]
    sets = timing.operand_sets(one)
    assert sum(t.numel() * 4 for s in sets for t in s) >= timing.COLD_BYTES
    (result,) = one(*sets[0])
    torch.testing.assert_close(result, sets[0][0] @ sets[0][1])


def test_groups_are_measured_with_rows_in_all_of_them() -> None:
    x, w, ends = torch.randn(42, 16).bfloat16(), torch.randn(4, 16, 8).bfloat16(), torch.tensor([1, 2, 3, 42])
    gm = graph_of(lambda x, w, e: torch._grouped_mm(x, w, offs=e), x, w, ends.int())
    node = next(n for n in gm.graph.nodes if n.target is torch.ops.aten._grouped_mm.default)
    (_, _, given), *_ = timing.operand_sets(one_call(node)[0])
    assert given.tolist() == [10, 21, 31, 42]


def test_measured_for_real(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward, sizes that vary, several results, layouts: every kind of call can be measured."""
    monkeypatch.setattr(timing, "COLD_BYTES", 1 << 16)
    monkeypatch.setattr(timing, "BUDGET_S", 0.01)
    conv = torch.nn.Conv2d(8, 8, 3, padding=1)
    q = torch.randn(1, 2, 40, 16, requires_grad=True)
    image = torch.randn(1, 8, 9, 9)

    def fn(x: Any, w: Any, image: Any, q: Any) -> Any:
        attended = F.scaled_dot_product_attention(q, q, q)
        return F.gelu(x @ w.t()).sum() + conv(image).sum() + attended.square().sum()

    with caplog.at_level(logging.INFO, logger="dicp.tuning"):
        got = torch.compile(fn, backend="dicp_cpu", mode="max-autotune")(X, W, image, q)
        got.backward()
    torch.testing.assert_close(got, fn(X, W, image, q))
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) >= 3 and not [line for line in lines if "failed" in line or "not measured" in line]
    assert chosen(product, torch.randn(9, 300), W, mode="max-autotune", dynamic=True)
    assert cli.main(["costs"]) == 0
    shown = capsys.readouterr().out
    assert "  * " in shown and " us  " in shown and "~16,300]" in shown.replace("~512", "300")
    assert cli.main(["costs", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["costs"]
    assert all(row["choice"] in row["microseconds"] for row in rows) and len(rows) >= 4


def test_rounds_go_on_while_a_candidates_least_time_is_a_single_one() -> None:
    """The first candidate is slowed by others' work in all but one of the rounds that would be enough."""
    times = {
        "slowed": iter([9.0, 9.0, 7.0, 9.0, 8.0, 5.0, 9.0, 9.0, 9.0, 4.0, 4.0, 4.0]),
        "even": itertools.repeat(6.0),
    }
    last: list[str] = []
    calls = {name: lambda args, name=name: last.append(name) for name in times}

    def elapsed(work: Any) -> float:
        work()
        return next(times[last[-1]])

    assert timing.time_calls(calls, [[]], elapsed) == {"slowed": 4.0, "even": 6.0}
    assert next(times["slowed"]) == 4.0  # agreed: not asked for more


def test_a_vendor_that_has_a_clock_is_asked_for_it(timer: Timer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Config] = []

    def clock(self: Any, config: Config) -> timing.Elapsed:
        asked.append(config)
        return timing.on_host

    monkeypatch.setattr(type(cpu), "clock", clock, raising=False)
    chosen(product, X, W, mode="max-autotune")
    assert asked and timer.calls

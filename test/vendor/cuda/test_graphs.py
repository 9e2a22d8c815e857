"""CUDA graph logic, with a stand-in for torch.cuda: a "capture" remembers the call and the memory it used."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dicp import compat
from dicp.ir import index as ix
from dicp.schedule.defs import Buffer, Raw
from dicp.vendor.cuda_graph import graphs


class FakeCuda:
    """Replaying runs the function again on the captured inputs, into the captured results, which it knows as
    a graph does: by where they are."""

    def __init__(self) -> None:
        self.captures, self.replays, self.stream, self.fail = 0, 0, 7, False
        self.kept: list[torch.Tensor] = []  # a graph only knows where its inputs were

    def place(self, device: torch.device) -> tuple[int, int]:
        return 0, self.stream

    def capturing(self) -> bool:
        return False

    def capture(self, run: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
        if self.fail:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.captures += 1
        given = inspect.getclosurevars(run).nonlocals.get("given", [])
        given[:] = [g.detach() if isinstance(g, torch.Tensor) else g for g in given]
        self.kept += [g for g in given if isinstance(g, torch.Tensor)]
        results = run()
        theirs = {g.untyped_storage().data_ptr() for g in given if isinstance(g, torch.Tensor)}
        weak = [None if r.untyped_storage().data_ptr() in theirs else r.detach() for r in results]

        def replay() -> None:
            self.replays += 1
            for kept, new in zip(weak, run()):
                if kept is not None and kept.data_ptr() != new.data_ptr():
                    kept.copy_(new)

        return replay, results

    def users(self, t: torch.Tensor) -> int:
        mine = sum(k.untyped_storage().data_ptr() == t.untyped_storage().data_ptr() for k in self.kept)
        return compat.storage_users(t) - mine


def program(
    inputs: list[Any],
    writes: frozenset[str] = frozenset(),
    externs: tuple[Any, ...] = (),
    marked: frozenset[str] = frozenset(),
    called: frozenset[str] = frozenset(),
) -> Any:
    """called: what a library call writes."""
    item = object.__new__(graphs.Launch)
    item.writes = writes
    call = SimpleNamespace(outputs=[None, *(SimpleNamespace(name=n) for n in called)])
    return SimpleNamespace(
        name="graph",
        lowered=SimpleNamespace(inputs=inputs, marked=marked, outputs=[]),
        python_calls=externs,
        items=[item, call],
        plan=SimpleNamespace(find=lambda n: n),
    )


def buffer(name: str, n: Any = 4) -> Buffer:
    return Buffer(name, (n,), torch.float32, (1,), "input")


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


def add(args: list[Any]) -> tuple[Any, ...]:
    x, w = args
    args.clear()
    return (x + w,)


def test_third_call_replays(cuda: FakeCuda) -> None:
    call = graphs.capturing(add, program([buffer("x"), buffer("w")]), cuda)
    x, w = torch.ones(4), torch.full((4,), 2.0)
    for k in range(4):
        x.fill_(k)
        assert torch.equal(call([x, w])[0], x + w)
    assert (cuda.captures, cuda.replays) == (1, 3)


def test_moving_inputs_are_copied_and_weights_are_not(cuda: FakeCuda) -> None:
    call = graphs.capturing(add, program([buffer("x"), buffer("w")]), cuda)
    w, alive = torch.full((4,), 2.0), []
    for _ in range(4):
        x = torch.randn(4)
        alive.append(x)
        assert torch.equal(call([x, w])[0], x + w)
    known = next(iter(call.graphed.sizes.values()))
    assert known.copied == {0}
    assert cuda.captures == 1


def test_moving_inputs_may_be_expanded(cuda: FakeCuda) -> None:
    call = graphs.capturing(add, program([buffer("x"), buffer("w")]), cuda)
    w, alive = torch.full((4,), 2.0), []
    for _ in range(4):
        x = torch.randn(1).expand(4)
        alive.append(x)
        assert torch.equal(call([x, w])[0], x + w)
    assert (cuda.captures, cuda.replays) == (1, 3)


def test_held_results_are_never_overwritten(cuda: FakeCuda) -> None:
    call = graphs.capturing(add, program([buffer("x"), buffer("w")]), cuda)
    x, w, kept = torch.ones(4), torch.zeros(4), []
    for k in range(6):
        x.fill_(k)
        kept.append(call([x, w])[0][:2])  # a view keeps them too
    assert [int(r[0]) for r in kept] == list(range(6))
    assert cuda.captures == graphs.INSTANCES


def forward(args: list[Any]) -> tuple[Any, ...]:
    (x,) = args
    args.clear()
    return x.sum().reshape(1), x * 2


def backward(args: list[Any]) -> tuple[Any, ...]:
    saved, grad = args
    args.clear()
    return (saved * grad,)


@pytest.fixture
def steps(cuda: FakeCuda) -> tuple[Any, Any]:
    """A forward and a backward pass; the second takes what the first has saved."""
    return (
        graphs.capturing(forward, program([buffer("x")]), cuda),
        graphs.capturing(backward, program([buffer("saved"), buffer("grad")]), cuda),
    )


def test_what_a_captured_forward_pass_saves_is_read_in_place(steps: tuple[Any, Any], cuda: FakeCuda) -> None:
    first, second = steps
    x, alive = torch.zeros(4), []
    for k in range(6):
        x.fill_(k)
        saved = first([x])[1]
        alive.append(torch.full((4,), float(k + 1)))  # a gradient comes from anywhere
        (got,) = second([saved, alive[-1]])
        assert torch.equal(got, 2 * x * (k + 1))
        del saved, got
    (known,) = second.graphed.sizes.values()
    assert known.copied == {1} and known.chained == [0]
    assert len(known.instances) == 1 and cuda.captures == 2 and cuda.replays == 10


def test_each_forward_instance_has_a_backward_of_its_own(steps: tuple[Any, Any], cuda: FakeCuda) -> None:
    """Two passes forward, then two back, as where gradients of two batches add up."""
    first, second = steps
    x, grad = torch.zeros(4), torch.full((4,), 3.0)
    for k in range(5):
        saved = []
        for j in range(3):  # one more than there are instances: the last runs directly
            x.fill_(10 * k + j)
            saved.append(first([x])[1])
        for j, s in enumerate(saved):
            assert torch.equal(second([s, grad])[0], torch.full((4,), 6.0 * (10 * k + j)))
        del saved, s
    (known,) = second.graphed.sizes.values()
    assert known.chained == [0] and not known.copied
    assert len({instance.chained for instance in known.instances}) == len(known.instances) == 2


def test_captures_of_one_size_are_few(steps: tuple[Any, Any], cuda: FakeCuda) -> None:
    _, second = steps
    grad, others, direct = torch.ones(4), [], []
    for k in range(10):
        one = graphs.capturing(forward, program([buffer("x")]), cuda)
        others.append(one)
        x = torch.full((4,), float(k))
        for call in range(3):
            saved = one([x])[1]
            direct += [saved] if call == 0 else []  # a capture's results come to no place that was another's
            assert torch.equal(second([saved, grad])[0], 2 * x)
            del saved
    (known,) = second.graphed.sizes.values()
    assert len(known.instances) == graphs.MAX_CAPTURES and known.recaptures > graphs.MAX_RECAPTURES
    others.clear()
    del one
    gc.collect()
    assert not any(i.chained[0] in graphs.RESULTS for i in known.instances)  # their memory is gone


def test_what_comes_from_elsewhere_for_good_is_copied(steps: tuple[Any, Any], cuda: FakeCuda) -> None:
    first, second = steps
    x, grad, alive = torch.ones(4), torch.ones(4), []
    for _ in range(4):
        assert torch.equal(second([first([x])[1], grad])[0], 2 * x)
    (known,) = second.graphed.sizes.values()
    assert known.chained == [0]
    before = cuda.replays
    for k in range(12):
        alive.append(torch.full((4,), float(k)))
        assert torch.equal(second([alive[-1], grad])[0], alive[-1])
    assert known.copied == {0} and not known.chained
    assert cuda.replays - before == 12 - graphs.MAX_RECAPTURES


def test_a_view_of_what_another_capture_left_does_not_hold_it(steps: tuple[Any, Any], cuda: FakeCuda) -> None:
    def halves(args: list[Any]) -> tuple[Any, ...]:
        saved, grad = args
        args.clear()
        return saved * grad, saved[2:]

    first, _ = steps
    second = graphs.capturing(halves, program([buffer("saved"), buffer("grad")]), cuda)
    x, grad = torch.zeros(4), torch.ones(4)
    for k in range(8):
        x.fill_(k)
        saved = first([x])[1]
        got, half = second([saved, grad])
        assert torch.equal(got, 2 * x) and torch.equal(half, 2 * x[2:])
        assert half.data_ptr() == saved[2:].data_ptr()
        del saved, got, half
    assert cuda.captures == 2 and cuda.replays == 14


def test_a_view_of_an_input_goes_with_it_into_other_memory() -> None:
    whole = torch.arange(10.0)
    kept = graphs._kept([whole[:4][1:3]], [whole[:4]], {whole.untyped_storage().data_ptr(): 0})
    assert torch.equal(kept[0].of([whole[5:9]]), whole[6:8])


@pytest.mark.parametrize("how", ["writes", "called"])
def test_mutated_input_is_copied_back(how: str, cuda: FakeCuda) -> None:
    def bump(args: list[Any]) -> tuple[Any, ...]:
        (x,) = args
        args.clear()
        x.add_(1)
        return (x * 2,)

    call = graphs.capturing(bump, program([buffer("x")], **{how: frozenset({"x"})}), cuda)
    for k in range(4):
        x = torch.full((4,), float(k))
        keep = x.clone()
        cuda_before = cuda.captures
        out = call([x])[0]
        if cuda.captures == cuda_before:  # the stand-in's capture runs the function; a real one only records
            assert torch.equal(x, keep + 1)
            assert torch.equal(out, 2 * (keep + 1))
        del keep, out
    assert cuda.replays


def test_a_conjugated_input_is_not_replayed(cuda: FakeCuda) -> None:
    """A graph reads memory, which holds something else."""
    call = graphs.capturing(lambda args: (args[0] * 2,), program([buffer("x")], marked=frozenset({"x"})), cuda)
    for _ in range(4):
        x = torch.randn(4, dtype=torch.complex64).conj()
        torch.testing.assert_close(call([x])[0], x * 2)
    assert cuda.captures == cuda.replays == 0


def test_input_that_is_a_result_is_the_callers_own(cuda: FakeCuda) -> None:
    def same(args: list[Any]) -> tuple[Any, ...]:
        (x,) = args
        args.clear()
        return (x, x + 1)

    call = graphs.capturing(same, program([buffer("x")]), cuda)
    for _ in range(4):
        x = torch.randn(4)
        assert call([x])[0] is x


def test_what_nobody_reads_is_no_number_to_know_captures_by(cuda: FakeCuda) -> None:
    call = graphs.capturing(lambda args: (args[0] + 1,), program([buffer("x"), Raw("generator")]), cuda)
    for _ in range(6):
        call([torch.ones(4), torch.Generator()])
    assert cuda.captures == 1 and len(call.graphed.sizes) == 1


def test_each_stream_and_size_has_its_own_capture(cuda: FakeCuda) -> None:
    s = ix.of(ix.Var("s0", None, 2))
    call = graphs.capturing(add, program([buffer("x", s), buffer("w", s)]), cuda)
    for n in (4, 8):
        x, w = torch.ones(n), torch.ones(n)
        for _ in range(3):
            assert call([x, w])[0].shape == (n,)
    cuda.stream = 8
    for _ in range(3):
        call([x, w])
    assert cuda.captures == 3


def test_failed_capture_runs_directly_and_says_so(cuda: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    cuda.fail = True
    call = graphs.capturing(add, program([buffer("x"), buffer("w")]), cuda)
    x = torch.ones(4)
    for _ in range(3):
        assert torch.equal(call([x, x])[0], x + x)
    assert "not permitted" in caplog.text


def test_what_cannot_be_captured_is_named(caplog: pytest.LogCaptureFixture) -> None:
    node, given = SimpleNamespace(target="aten.nonzero.default"), {"args": (), "kwargs": {}}
    extern = SimpleNamespace(node=node, results=(ix.of(ix.Var("u0")),), note="model.py:3", **given)
    assert "depends on data" in (graphs.obstacle(program([buffer("x")], externs=(extern,))) or "")
    sized = SimpleNamespace(node=node, results=(buffer("y", ix.of(ix.Var("u0"))),), note="model.py:3", **given)
    assert "depends on data" in (graphs.obstacle(program([buffer("x")], externs=(sized,))) or "")
    same = SimpleNamespace(node=node, results=(buffer("y", ix.of(ix.Var("s0"))),), note="model.py:3", **given)
    assert graphs.obstacle(program([buffer("x", ix.of(ix.Var("s0")))], externs=(same,))) is None
    raw = Raw("generator")
    draws = SimpleNamespace(node=node, results=(), note="", args=(), kwargs={"rng_state": [raw]})
    assert "not a plain tensor" in (graphs.obstacle(program([raw], externs=(draws,))) or "")
    assert graphs.obstacle(program([raw, buffer("x")])) is None  # nobody reads it
    assert graphs.capturing(add, program([raw], externs=(draws,))) is add
    assert "without a CUDA graph" in caplog.text


class FakeTorchCuda:
    """torch.cuda as far as a capture goes: a graph whose end fails leaves its stream the current one."""

    def __init__(self) -> None:
        self.now = 1  # the current device
        self.streams = {0: "s0", 1: "s1"}
        self.fails = False
        self.log: list[str] = []
        self.CUDAGraph = lambda: SimpleNamespace(replay=lambda: None)
        self.graph_pool_handle = lambda: (0, 7)
        self.synchronize = lambda: None

    def current_stream(self) -> str:
        return self.streams[self.now]

    def set_stream(self, stream: str) -> None:
        self.streams[self.now] = stream

    def Stream(self) -> str:
        return f"capture{self.now}"

    @contextmanager
    def device(self, index: int) -> Any:
        before, self.now = self.now, index
        try:
            yield
        finally:
            self.now = before

    @contextmanager
    def graph(self, graph: Any, pool: Any = None, stream: str = "", capture_error_mode: str = "") -> Any:
        before = self.current_stream()
        self.set_stream(stream)
        self.log.append(f"begin on {stream}")
        yield
        if self.fails:
            self.fails = False
            raise RuntimeError("operation failed due to a previous error during capture")
        self.log.append("end")
        self.set_stream(before)


@pytest.fixture
def torch_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeTorchCuda:
    fake = FakeTorchCuda()
    monkeypatch.setattr(graphs.torch, "cuda", fake)
    monkeypatch.setattr(graphs, "CAPTURE_STREAMS", {})
    monkeypatch.setattr(compat, "forget_cublas_workspaces", lambda: fake.log.append("forget workspaces"))
    monkeypatch.setattr(compat, "end_allocations", lambda index, pool: fake.log.append(f"leave {pool} of {index}"))
    monkeypatch.setattr(compat, "raw_stream", lambda index: 0)
    monkeypatch.setattr(graphs.torch, "zeros", lambda n, device: fake.log.append(f"work on {device}"))
    return fake


def test_a_capture_is_made_on_its_device_with_workspaces_of_its_own(torch_cuda: FakeTorchCuda) -> None:
    _, results = graphs.CudaBackend().capture(lambda: torch_cuda.current_stream(), torch.device("cuda", 0))
    assert results == "capture0" and torch_cuda.streams == {0: "s0", 1: "s1"} and torch_cuda.now == 1
    assert torch_cuda.log == ["forget workspaces", "begin on capture0", "end", "forget workspaces"]


def test_a_capture_that_fails_leaves_streams_and_memory_as_they_were(torch_cuda: FakeTorchCuda) -> None:
    torch_cuda.fails = True
    with pytest.raises(RuntimeError, match="previous error"):
        graphs.CudaBackend().capture(lambda: None, torch.device("cuda", 0))
    assert torch_cuda.streams == {0: "s0", 1: "s1"} and torch_cuda.now == 1
    assert torch_cuda.log[2:] == ["leave (0, 7) of 0", "begin on capture0", "work on cuda:0", "end", "forget workspaces"]


def test_one_capture_at_a_time(torch_cuda: FakeTorchCuda) -> None:
    graphs.CudaBackend().capture(lambda: torch_cuda.log.append(str(graphs.CAPTURE.locked())), torch.device("cuda", 0))
    assert torch_cuda.log[2] == "True" and not graphs.CAPTURE.locked()


def test_a_number_on_the_cpu_is_filled_in() -> None:
    """Its memory may be pinned and written again by the time a copy is made of it."""
    static = SimpleNamespace(is_cpu=False, filled=[])
    static.fill_ = static.filled.append
    graphed = SimpleNamespace(raise_checks=None, mutated=set())
    made = graphs.Instance(lambda: None, {0: static}, (), [])
    graphs.Graphed._replay(graphed, made, [torch.tensor(2.5)])
    assert static.filled == [2.5]

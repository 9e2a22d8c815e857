"""On a GPU, where there is one: streams, threads, memory, CUDA graphs, sizes beyond 32 bits. What is computed is the
conformance suite's part (`python -m dicp.conformance --vendor cuda_graph`)."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dicp.dynamo_bridge.backend import dicp_cuda

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU")

MODES = ("default", "reduce-overhead")


@pytest.fixture
def compiled(cuda_cache: str) -> Callable[..., Any]:
    def make(fn: Any, mode: str = "default", **how: Any) -> Any:
        return torch.compile(fn, backend=_in(cuda_cache, mode), **how)

    return make


def _in(cache: str, mode: str) -> Callable[..., Any]:
    def backend(gm: Any, inputs: Any) -> Any:
        return dicp_cuda(gm, inputs, mode=mode, options={"cache_dir": cache})

    return backend


@pytest.fixture
def no_waiting() -> Iterator[Callable[[], None]]:
    """From its call on, whatever waits for the GPU is an error."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


class Net(torch.nn.Module):
    """A table, a product with an activation, a norm and a product."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(50, 64)
        self.wide, self.norm, self.narrow = torch.nn.Linear(64, 96), torch.nn.LayerNorm(96), torch.nn.Linear(96, 10)
        self.to("cuda", dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.narrow(self.norm(F.gelu(self.wide(self.table(ids)))))


def tokens(seed: int, n: int = 37) -> torch.Tensor:
    return torch.randint(0, 50, (4, n), generator=torch.Generator().manual_seed(seed)).cuda()


@pytest.mark.parametrize("mode", MODES)
def test_inputs_change_from_call_to_call(mode: str, compiled: Any) -> None:
    net = Net().eval()
    run = compiled(net, mode, fullgraph=True)
    with torch.no_grad():
        for seed in range(6):
            torch.testing.assert_close(run(tokens(seed)), net(tokens(seed)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_a_call_does_not_wait_for_the_gpu(mode: str, compiled: Any, no_waiting: Any) -> None:
    net = Net().eval()
    run, ids = compiled(net, mode), tokens(0)
    with torch.no_grad():
        want = net(ids)
        for _ in range(4):
            run(ids)
        no_waiting()
        got = run(ids)
    torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_training_steps(mode: str, compiled: Any) -> None:
    nets = [Net(), Net()]
    nets[1].load_state_dict(nets[0].state_dict())
    run = compiled(nets[1], mode)
    optimizers = [torch.optim.SGD(n.parameters(), lr=0.1) for n in nets]
    for seed in range(6):
        for call, optimizer in zip((nets[0], run), optimizers):
            optimizer.zero_grad()
            F.cross_entropy(call(tokens(seed)).flatten(0, 1), tokens(seed).flatten() % 10).backward()
            optimizer.step()
    for a, b in zip(nets[0].parameters(), nets[1].parameters()):
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_sizes_change(mode: str, compiled: Any) -> None:
    net = Net().eval()
    run = compiled(net, mode, dynamic=True)
    with torch.no_grad():
        for n in (37, 5, 64, 37, 5, 37, 5, 37, 5):
            torch.testing.assert_close(run(tokens(n, n)), net(tokens(n, n)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_the_current_stream_is_used(mode: str, compiled: Any) -> None:
    """Work behind a slow kernel of a side stream reads what that kernel has written."""
    run = compiled(lambda x: (x * 2).sum(-1), mode)
    x = torch.zeros(64, 1024, device="cuda")
    for _ in range(4):
        run(x)
    side = torch.cuda.Stream()
    for _ in range(4):
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            x.zero_()
            torch.cuda._sleep(50_000_000)
            x.fill_(1)
            got = run(x)
        side.synchronize()
        assert got.eq(2048).all()


@pytest.mark.parametrize("mode", MODES)
def test_threads_with_streams_of_their_own(mode: str, compiled: Any) -> None:
    net = Net().eval()
    run = compiled(net, mode)
    with torch.no_grad():
        want = [net(tokens(seed)) for seed in range(4)]
        run(tokens(0))
    torch.cuda.synchronize()
    problems: list[str] = []

    def serve(seed: int) -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    got = run(tokens(seed))
                    torch.cuda.current_stream().synchronize()
                    if not torch.allclose(got, want[seed], rtol=1e-4, atol=1e-5):
                        problems.append(f"thread {seed} is wrong")
        except Exception as e:  # told by the thread that started this one
            problems.append(f"{type(e).__name__}: {e}")

    threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not problems, problems[:3]


@pytest.mark.parametrize("mode", MODES)
def test_a_written_input_is_written(mode: str, compiled: Any) -> None:
    def bump(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x.sum(-1)

    run = compiled(bump, mode)
    alive = []
    for _ in range(5):
        x = torch.zeros(8, 33, device="cuda")
        alive.append(x)
        assert run(x).eq(33).all() and x.eq(1).all()


def test_results_outlive_replays_of_another_capture(compiled: Any) -> None:
    """What one capture frees on its way is not where the other's results are."""
    w = torch.randn(256, 256, device="cuda")
    run = compiled(lambda x: (torch.softmax((x @ w).relu() @ w, 1) @ w).cos(), "reduce-overhead")
    inputs = [torch.eye(256, device="cuda") * k for k in (1, 2, 3, 4)]
    run(inputs[0])
    for _ in range(3):
        first, second = run(inputs[1]), run(inputs[2])
        want = second.clone()
        del first
        third = run(inputs[3])
        assert torch.equal(second, want)
        del second, third


def test_results_that_are_held_stay(compiled: Any) -> None:
    run = compiled(lambda x: x * 2, "reduce-overhead")
    x, held = torch.zeros(64, device="cuda"), []
    for k in range(8):
        x.fill_(k)
        held.append(run(x)[:2])
    assert [int(t[0]) for t in held] == [2 * k for k in range(8)]


@pytest.mark.parametrize("mode", MODES)
def test_a_seed_means_what_it_means_under_eager(mode: str, compiled: Any) -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5) + torch.rand_like(x)

    run, x = compiled(noisy, mode), torch.ones(37, 53, device="cuda")
    for _ in range(4):
        run(x)
    torch.manual_seed(3)
    first, second = run(x).clone(), run(x).clone()
    torch.manual_seed(3)
    again = run(x).clone()
    torch.manual_seed(3)
    assert torch.equal(again, first) and not torch.equal(first, second)
    torch.testing.assert_close(first, noisy(x))


def test_inside_a_capture_of_the_users(compiled: Any) -> None:
    net = Net().eval()
    run, ids = compiled(net, "reduce-overhead"), tokens(0)
    with torch.no_grad():
        for _ in range(4):
            run(ids)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = run(ids)
        ids.copy_(tokens(1))
        graph.replay()
        torch.testing.assert_close(got, net(ids), rtol=1e-4, atol=1e-5)


def test_what_cannot_be_captured_runs_all_the_same(compiled: Any, caplog: pytest.LogCaptureFixture) -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run = compiled(lambda x: x.nonzero() * 2, "reduce-overhead")
        x = torch.arange(9, device="cuda") % 3
        for _ in range(4):
            assert torch.equal(run(x), x.nonzero() * 2)
    assert "without a CUDA graph" in caplog.text


@torch.library.custom_op("dicp_test_device::waits", mutates_args=())
def waits(x: torch.Tensor) -> torch.Tensor:
    torch.cuda.synchronize()
    return x.clone()


@waits.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_a_capture_that_fails_leaves_random_numbers_usable(compiled: Any, caplog: pytest.LogCaptureFixture) -> None:
    run, x = compiled(lambda x: waits(x * 2) + 1, "reduce-overhead"), torch.ones(64, device="cuda")
    for _ in range(4):
        assert run(x).eq(3).all()
    assert "the capture failed" in caplog.text
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.rand(8, device="cuda").unique().numel() > 1


def test_a_capture_outlives_the_one_whose_workspace_it_could_have_taken(compiled: Any) -> None:
    """cuBLAS splits products of one row and works in memory that torch keeps for a stream."""
    x, w = torch.randn(1, 4096, device="cuda"), torch.randn(4096, 4096, device="cuda")
    first, second = (compiled(lambda x, w, k=k: x @ w + k, "reduce-overhead") for k in range(2))
    for run in (first, second):
        for _ in range(3):
            run(x, w)
    moved = x.clone()
    first(moved, w)  # its capture goes, and another is made
    gc.collect()
    torch.cuda.empty_cache()
    others = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(32)]
    for _ in range(3):
        torch.testing.assert_close(second(x, w), x @ w + 1, rtol=1e-3, atol=1e-3)
    assert all(o.isnan().all() for o in others)


def test_copies_between_devices(compiled: Any) -> None:
    mean = torch.tensor([0.485, 0.456, 0.406])

    def normalise(x: torch.Tensor, rows: torch.Tensor, table: torch.Tensor) -> Any:
        looked_up = table[rows.to(table.device)]
        return x - mean.to(x.device)[:, None], (x + 1).cpu(), looked_up, torch.arange(3) * 2

    for mode in ("default", "reduce-overhead"):
        run = compiled(normalise, mode)
        x, table = torch.randn(3, 8, device="cuda"), torch.randn(9, 4, device="cuda")
        for rows in (torch.tensor([0, 8]), torch.tensor([3, 1]), torch.tensor([5, 5])):
            for got, expected in zip(run(x, rows, table), normalise(x, rows, table), strict=True):
                assert got.device == expected.device
                torch.testing.assert_close(got, expected)


def test_an_index_out_of_range_is_told_by_the_next_call(compiled: Any) -> None:
    run = compiled(lambda x, i: x[i] * 2)
    x = torch.ones(4, device="cuda")
    run(x, torch.tensor([3, -4], device="cuda"))
    run(x, torch.tensor([4], device="cuda").repeat(2))
    torch.cuda.synchronize()
    with pytest.raises(IndexError, match="out of range"):
        run(x, torch.tensor([0, 1], device="cuda"))


MEMORY = """
import torch
run = torch.compile(lambda x: torch.softmax(x.cumsum(0), -1).sum(0), backend="dicp_cuda")
x = torch.randn(4096, 4096, device="cuda")  # a block of its own in the allocator
want = run(x).clone()
torch.cuda.synchronize()
torch.cuda.empty_cache()
torch.cuda.reset_peak_memory_stats()
before = torch.cuda.memory_allocated()
got = run(x)
assert torch.cuda.max_memory_allocated() - before >= x.nbytes
del got
assert torch.cuda.memory_allocated() == before
torch.cuda.empty_cache()
total = torch.cuda.get_device_properties().total_memory
torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (1 << 20)) / total)
try:
    run(x)
except torch.OutOfMemoryError:
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.testing.assert_close(run(x), want)
else:
    raise AssertionError("memory was found beyond what is allowed")
"""


def test_memory_is_the_allocators() -> None:
    """Peaks are in its statistics, all comes back, and too little memory is torch's own error. In a process of
    its own: what other tests leave in the allocator is memory too."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_more_elements_than_32_bits_count(compiled: Any) -> None:
    run = compiled(lambda x: x + 1)
    x = torch.zeros((1 << 31) + 4099, dtype=torch.int8, device="cuda")
    x[-5:] = 7
    got = run(x)
    assert got[-6:].tolist() == [1, 8, 8, 8, 8, 8] and got[: 1 << 20].eq(1).all()
    assert compiled(lambda x: x.sum(dtype=torch.int64))(x).item() == 35


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_floats_of_eight_bits(dtype: torch.dtype, compiled: Any) -> None:
    x = torch.randn(4096, device="cuda") * torch.logspace(-6, 6, 4096, device="cuda")
    run = compiled(lambda x: x.to(dtype).to(torch.float32) * 2)
    torch.testing.assert_close(run(x), x.to(dtype).to(torch.float32) * 2, equal_nan=True, rtol=0, atol=0)


def test_a_measured_choice_computes_the_same(compiled: Any) -> None:
    net = Net(torch.bfloat16).eval()
    run = compiled(net, "max-autotune")
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(run(tokens(0)), net(tokens(0)), rtol=2e-2, atol=2e-2)


def test_attention_at_odd_addresses(compiled: Any) -> None:
    """Calls between them at addresses of whole 16 bytes, in case plans are kept."""
    q, k, v = (torch.randn(2 * 4 * 7 * 8 + 1, device="cuda").bfloat16()[1:].view(2, 4, 7, 8) for _ in range(3))
    attend = F.scaled_dot_product_attention
    with torch.no_grad():
        want = attend(*(t.double() for t in (q, k, v)))
        for _ in range(2):
            torch.testing.assert_close(compiled(attend)(q, k, v).double(), want, rtol=2e-2, atol=2e-2)
            compiled(attend)(q.clone(), k.clone(), v.clone())


def test_logits_of_an_odd_vocabulary(compiled: Any) -> None:
    x, w = torch.randn(256, 512, device="cuda").bfloat16(), torch.randn(50257, 512, device="cuda").bfloat16()
    got = compiled(F.linear)(x, w)
    assert got.is_contiguous()
    torch.testing.assert_close(got.float(), x.float() @ w.float().t(), rtol=2e-2, atol=1e-1)


def test_numbers_of_the_host_beside_tensors(compiled: Any) -> None:
    run = compiled(lambda x, s: x * s + 1)
    x = torch.randn(33, device="cuda")
    for s in (2.0, 3.0):
        torch.testing.assert_close(run(x, torch.tensor(s)), x * s + 1)


def test_the_clock_leaves_out_what_the_host_takes() -> None:
    from dicp.vendor.cuda_graph.clock import GpuClock

    on_gpu = GpuClock()
    x = torch.zeros(1 << 20, device="cuda")

    def slow_to_make() -> None:
        time.sleep(0.01)
        x.add_(1)

    assert on_gpu(slow_to_make) < 2e-3
    y = torch.zeros(1 << 28, device="cuda")
    assert on_gpu(lambda: y.add_(1)) > 5e-4  # 2 GiB moved: above 4 TB/s

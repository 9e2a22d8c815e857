"""Training on several processes: torch's wrappers around and inside what is compiled, and collectives in graphs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

PROCESSES = 2
pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo"
)


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(32, 128), Block(32, 64)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def trained(model: nn.Module, rank: int) -> Tensor:
    """The parameters after three steps, each process on data of its own."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    source = torch.Generator().manual_seed(rank)
    for _ in range(3):
        model(torch.randn(16, 32, generator=source)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in whole])


def off(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max())


def replicated(rank: int, backend: Callable[..., Any]) -> float:
    """Compiled around the wrapper, which cuts the graph into buckets, and inside of it."""
    from torch.nn.parallel import DistributedDataParallel

    want = trained(DistributedDataParallel(Network()), rank)
    around = trained(torch.compile(DistributedDataParallel(Network()), backend=backend), rank)  # type: ignore[arg-type]
    inside = Network()
    inside.compile(backend=backend)
    return max(off(around, want), off(trained(DistributedDataParallel(inside), rank), want))


def sharded(rank: int, backend: Callable[..., Any]) -> float:
    from torch.distributed.fsdp import fully_shard

    def shards(compiled: bool) -> nn.Module:
        model = Network()
        for block in model.blocks:
            if compiled:
                block.compile(backend=backend)
            fully_shard(block)
        fully_shard(model)
        return model

    return off(trained(shards(True), rank), trained(shards(False), rank))


def parallel(rank: int, backend: Callable[..., Any]) -> float:
    """Layers of which each process has a part: collectives are in the graph, forward and backward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (PROCESSES,))
    plan = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
    model: Any = parallelize_module(Network().blocks, mesh, plan)
    block, alone = model[0], Network().blocks[0]
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    got, want = torch.compile(block, backend=backend)(x), alone(x)
    got.square().sum().backward()
    want.square().sum().backward()
    return max(off(got, want), off(block.up.weight.grad.full_tensor(), alone.up.weight.grad))  # type: ignore[union-attr]


def in_flight(rank: int, backend: Callable[..., Any]) -> float:
    """What a collective reads while kernels run stays as it is, whether somebody reads it yet or not."""
    ops, group = torch.ops._c10d_functional, dist.group.WORLD.group_name

    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        a, b = x.relu(), x @ w
        first = ops.all_gather_into_tensor(a, PROCESSES, group)
        second = ops.all_gather_into_tensor(b, PROCESSES, group)
        c = (b.exp() @ w).sin() @ w
        return c.cos() @ w, ops.wait_tensor(first) + 1, ops.wait_tensor(second) + 1

    worst, compiled = 0.0, torch.compile(fn, backend=backend)
    for _ in range(5):
        x, w = torch.randn(512, 512), torch.randn(512, 512) / 64
        for got, want in zip(compiled(x, w), fn(x, w), strict=True):
            worst = max(worst, off(got, want))
    return worst


WAYS = {f.__name__: f for f in (replicated, sharded, parallel, in_flight)}


def _work(rank: int, folder: str) -> None:
    from dicp.compiler import observe

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host's name need not resolve
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=PROCESSES)
    found = {}
    for name, way in WAYS.items():
        graphs: list[Any] = []
        with observe(graphs.append):
            found[name] = (way(rank, "dicp_cpu"), len(graphs))  # type: ignore[arg-type]
        torch._dynamo.reset()
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process found."""
    folder = tmp_path_factory.mktemp("distributed")
    torch.multiprocessing.spawn(_work, (str(folder),), nprocs=PROCESSES)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(PROCESSES)]


@pytest.mark.parametrize("way", WAYS)
def test_as_eager(way: str, found: list[dict[str, Any]]) -> None:
    for one in found:
        difference, graphs = one[way]
        assert graphs > 0 and difference < 1e-4

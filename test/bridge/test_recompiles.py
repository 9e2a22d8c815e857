"""Sizes that are marked or come from data; recompiles said in a line; compiling ahead."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import close, compiles
from torch._dynamo.exc import BackendCompilerFailed

import dicp
from dicp.dynamo_bridge.recompiles import describe
from dicp.errors import NoCompileError

Args = tuple[Any, ...]


def seeded(n: int) -> torch.Tensor:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(n))


def marked(mark: Callable[[torch.Tensor, int], None], *more: torch.Tensor) -> Callable[[int], Args]:
    def make(n: int) -> Args:
        x = seeded(n)
        mark(x, 0)
        return (x, *more)

    return make


def some(n: int) -> Args:
    """Twelve numbers, n of which are not zero."""
    return (torch.where(torch.arange(12) < n, torch.arange(1.0, 13.0), 0.0),)


unbacked, dynamic = torch._dynamo.decorators.mark_unbacked, torch._dynamo.mark_dynamic
W, B = torch.ones(8, 4), torch.arange(8.0)

CASES: dict[str, tuple[Callable[..., Any], Callable[[int], Args], Sequence[int]]] = {
    "mark_dynamic": (lambda x, w, b: F.gelu(F.linear(x, w, b)).softmax(-1), marked(dynamic, W, B), (3, 2, 7, 64)),
    "mark_unbacked": (lambda x: (x.softmax(-1) + x.sum(0), x.mean(1)), marked(unbacked), (0, 1, 2, 7)),
    "mark_unbacked_linear": (lambda x, w, b: F.gelu(F.linear(x, w, b)), marked(unbacked, W, B), (0, 1, 7)),
    "nonzero": (lambda x: x.nonzero().squeeze(1).float() * 2, some, (0, 1, 5, 12)),
    "chosen_rows": (lambda x: x[x.nonzero().squeeze(1)].exp().sum(), some, (0, 1, 5, 12)),
    "masked_select": (lambda x: x[x > 3].sin().sum(), some, (0, 3, 9)),
    "unique": (lambda x: torch.unique(x) * 2, some, (0, 3)),
    "matmul": (lambda x: (x[x > 0, None] @ x[None]).relu(), some, (3, 0, 12)),
    "item": (lambda n: torch.ones(n.item() + 2).cumsum(0), lambda n: (torch.tensor(n),), (3, 0, 1, 9)),
    "tolist": (
        lambda n: torch.cat([torch.ones(k) for k in n.tolist()]) + 1,
        lambda n: (torch.tensor([n, 2 * n + 1]),),
        (1, 2, 5),
    ),
    "item_float": (lambda x, s: x * s.item(), lambda n: (*some(3), torch.tensor(n / 2)), (1, 3, 0)),
    "item_bool": (
        lambda x, s: (x * s.item(), torch.full((2,), s.item()), torch.tensor(s.item()), s.item()),
        lambda n: (*some(3), torch.tensor(n > 0)),
        (1, 0, 2),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_compile(name: str) -> None:
    fn, make, sizes = CASES[name]
    settings = dict(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True)
    with torch._dynamo.config.patch(settings), compiles() as found:
        compiled = torch.compile(fn, backend="dicp_cpu", fullgraph=True)
        for n in sizes:
            close(compiled(*make(n)), fn(*make(n)), f"size {n}")
    assert len(found) == 1


# -- the line


def scaled(x: torch.Tensor, k: Any = 1) -> torch.Tensor:
    return (x * 2).softmax(0) * k


def test_recompiles_are_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    compiled = torch.compile(scaled, backend="dicp_cpu")
    with caplog.at_level(logging.INFO, "dicp"):
        for args in ((seeded(5),), (seeded(6),), (seeded(7),), (seeded(5).double(),), (seeded(5), 2), (seeded(5), 2.5)):
            compiled(*args)
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("recompile")]
    where = f"recompile scaled (test_recompiles.py:{scaled.__code__.co_firstlineno}): "
    assert [line.removeprefix(where) for line in lines] == [
        "tensor 'x' size mismatch at index 0. expected 5, actual 6",
        "tensor 'x' dtype mismatch. expected Float, actual Double",
        "k == 1, now 2",
        "type of k is <class 'int'>, now <class 'float'>",
    ]


class Model:
    training = False

    @property
    def broken(self) -> int:
        raise OSError


@pytest.mark.parametrize(
    ("reason", "line"),
    [
        ("0/1: L['m'].training == True  # if self.training:\nUser stack trace:\n  x", "L['m'].training == True, now False"),
        ("2 <= n.item()  # f", "2 <= n.item(), now 1"),
        ("12/3: m.broken == 3", "m.broken == 3"),
        ("0/0: GLOBAL_STATE changed: grad_mode", "GLOBAL_STATE changed: grad_mode"),
        ("0/0: __import__('os').getpid() == 3", "__import__('os').getpid() == 3"),
    ],
)
def test_describe(reason: str, line: str) -> None:
    assert describe(reason, "f", {"m": Model(), "n": torch.tensor(1)}) == f"recompile f: {line}"


# -- ahead


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = torch.nn.Embedding(10, 8), torch.nn.Linear(8, 10)
        self.norm = torch.nn.BatchNorm1d(8)
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.out(self.drop(self.norm(self.embed(ids).mean(1))).relu()) * scale


def test_precompile_serves_all_sizes_with_one_compile() -> None:
    model = Net().eval()
    with torch.no_grad():
        with compiles() as found:
            compiled = dicp.precompile(model, (torch.arange(8).view(2, 4),), [(2, 4), (3, 7), (16, 64)], backend="dicp_cpu")
        assert len(found) == 1
        with compiles() as found:
            for shape in ((3, 7), (2, 4), (5, 9), (16, 64)):
                ids = torch.randint(0, 10, shape)
                close(compiled(ids), model(ids))
        assert not found


def test_precompile_leaves_the_model_as_it_was() -> None:
    model = Net()
    model.out.bias.grad = torch.ones(10)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    with compiles() as found:
        dicp.precompile(model, {"ids": torch.arange(8).view(2, 4), "scale": 2.0}, backend="dicp_cpu")
    assert [c.role for c in found] == ["forward", "backward"]
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert model.out.weight.grad is None and model.out.bias.grad.tolist() == [1.0] * 10


def test_precompile_refuses_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        dicp.precompile(Net(), (torch.arange(8).view(2, 4),), [(2, 4, 3)])
    for sizes in ((2, 4), [2], []):
        with pytest.raises(ValueError, match="no list of shapes"):
            dicp.precompile(Net(), (torch.arange(8).view(2, 4),), sizes)
    with pytest.raises(TypeError, match=r"as a sequence, \(x,\)"):
        dicp.precompile(Net(), torch.arange(8).view(2, 4))


def test_no_compile_after_precompile() -> None:
    """A service: ready-made sizes run, another dtype would compile and is refused."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.exp().sum(0) + 1

    dicp.precompile(fn, (seeded(4),), [(4, 4), (9, 4)], backend="dicp_cpu")
    torch._dynamo.reset()  # another process, the same caches
    serving = dicp.precompile(
        fn, (seeded(4),), [(4, 4), (9, 4)], backend="dicp_cpu", options={"no_compile": True}
    )
    close(serving(seeded(6)), fn(seeded(6)))
    with pytest.raises(BackendCompilerFailed) as caught:
        serving(seeded(6).to(torch.int32))
    assert isinstance(caught.value.inner_exception, NoCompileError)

"""What every compiled function owes: eager's results, strides, aliasing, mutations and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from dicp.compiler import Compiled, observe

LOW = {torch.bfloat16: 2e-2, torch.float16: 4e-3}


def tensors(x: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(x) if isinstance(t, torch.Tensor)]


def copied(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Equal arguments that share no memory with these, but with each other as these do."""
    storages: dict[int, torch.UntypedStorage] = {}

    def copy(t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        key = t.untyped_storage()._cdata
        if key not in storages:
            storages[key] = t.untyped_storage().clone()
        fresh = torch.empty(0, dtype=t.dtype).set_(storages[key], t.storage_offset(), t.shape, t.stride())
        return fresh.requires_grad_(t.requires_grad)

    return tree_map(copy, args)  # type: ignore[no-any-return]


def close(actual: Any, expected: Any, what: str = "", exact: Callable[[], Any] | None = None) -> None:
    """exact: gives float64's values of the results. float32 ones that are not close to eager's, whose rounding
    depends on the order that the machine's libraries sum in, may be twice as far from those as eager's are."""
    mine, theirs = tensors(actual), tensors(expected)
    assert len(mine) == len(theirs), what
    for k, (a, e) in enumerate(zip(mine, theirs, strict=True)):
        tol = LOW.get(e.dtype, 1e-5) if e.is_floating_point() else 0
        try:
            torch.testing.assert_close(
                a.detach(), e.detach(), rtol=tol, atol=tol, equal_nan=True, msg=lambda m, k=k: f"{what} {k}: {m}"
            )
        except AssertionError:
            if exact is None or a.dtype != e.dtype or e.dtype != torch.float32:
                raise
            error, eagers = (float((t.detach() - tensors(exact())[k]).abs().max()) for t in (a, e))
            if not error <= 2 * eagers:
                raise
        assert a.stride() == e.stride(), f"{what} {k}: strides {a.stride()}, eager's {e.stride()}"
        assert a.requires_grad == e.requires_grad, f"{what} {k}: requires_grad"


def in_float64(args: tuple[Any, ...]) -> tuple[Any, ...]:
    widened = lambda t: t.detach().double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t
    return tree_map(widened, args)  # type: ignore[no-any-return]


def aliasing(results: Any, args: Any) -> list[list[int]]:
    """Which of the results and arguments share memory, as groups of positions."""
    groups: dict[int, list[int]] = {}
    for k, t in enumerate([*tensors(results), *tensors(args)]):
        if t.numel():
            groups.setdefault(t.untyped_storage()._cdata, []).append(k)
    return sorted(g for g in groups.values() if len(g) > 1)


def check(
    fn: Callable[..., Any],
    *args: Any,
    calls: int = 2,
    dynamic: bool | None = False,
    fullgraph: bool = True,
    aliases: bool = True,
    options: dict[str, Any] | None = None,
) -> list[Compiled]:
    """fn compiled against fn: results, strides, mutated arguments, aliasing. Returns the graphs that were compiled."""
    found: list[Compiled] = []
    compiled = torch.compile(fn, backend="dicp_cpu", dynamic=dynamic, fullgraph=fullgraph, options=options)
    with observe(found.append):
        for k in range(calls):
            mine, theirs = copied(args), copied(args)
            expected = fn(*theirs)
            actual = compiled(*mine)
            exact = lambda: fn(*in_float64(copied(args)))
            close(actual, expected, f"call {k}, result", exact)
            close(mine, theirs, f"call {k}, argument")
            if aliases:
                assert aliasing(actual, mine) == aliasing(expected, theirs), f"call {k}: aliasing"
    return found


def check_training(model: torch.nn.Module, *args: Any, rtol: float = 1e-4, **options: Any) -> None:
    """Results, gradients and buffers of a module after each of two backward passes."""
    import copy

    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="dicp_cpu", **options)
    for k in range(2):
        mine, theirs = copied(args), copied(args)
        got, want = compiled(*mine), twin(*theirs)
        close(got, want, f"call {k}, result")
        loss = lambda out: sum(
            (t.float() * torch.linspace(-1, 1, t.numel()).view(t.shape)).sum() for t in tensors(out)
        )
        loss(got).backward()
        loss(want).backward()
        pairs = list(zip([*model.parameters(), *mine], [*twin.parameters(), *theirs], strict=True))
        for n, (a, b) in enumerate(pairs):
            if not isinstance(a, torch.Tensor) or not a.requires_grad:
                continue
            assert (a.grad is None) == (b.grad is None), f"gradient {n}"
            if b.grad is not None:
                scale = float(b.grad.abs().max()) + 1e-6
                torch.testing.assert_close(
                    a.grad, b.grad, rtol=rtol, atol=rtol * scale, msg=lambda m, n=n: f"gradient {n}: {m}"
                )
        close(list(model.buffers()), list(twin.buffers()), "buffer")


@contextmanager
def compiles() -> Iterator[list[Compiled]]:
    """The graphs compiled inside."""
    found: list[Compiled] = []
    with observe(found.append):
        yield found

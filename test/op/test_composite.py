"""What single operators do not show: autocast, torch.func, custom functions and ops, control flow,
containers, RNNs, graph breaks.

Every test holds a compiled function to the eager one: values by the accuracy rule, dtypes, shapes, strides,
gradients.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # noqa: F401 - it defines the ops
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from dicp.conformance import tolerance

Fn = Callable[..., Any]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in nested containers, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, f.name) for f in dataclasses.fields(value)]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for v in value for t in tensors(v)] if isinstance(value, (list, tuple)) else []


def double(value: Any) -> Any:
    """Inexact tensors and modules in fp64."""
    if isinstance(value, torch.Tensor) and tolerance.is_inexact(value.dtype):
        return value.detach().to(tolerance.wide(value.dtype)).requires_grad_(value.requires_grad)
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(double(v) for v in value)
    if isinstance(value, dict):
        return {k: double(v) for k, v in value.items()}
    return value


def copied(value: Any) -> Any:
    """Tensors detached into copies with the same layout."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(copied(v) for v in value)
    if isinstance(value, dict):
        return {k: copied(v) for k, v in value.items()}
    return value


def accurate(actual: torch.Tensor, eager: torch.Tensor, reference: torch.Tensor | None) -> None:
    """The rule of docs/conformance.md; without a reference, 16 eps of the largest value may be rounding."""
    assert (actual.dtype, actual.shape, actual.device) == (eager.dtype, eager.shape, eager.device)
    if actual.layout != torch.strided:
        actual, eager = actual.to_dense(), eager.to_dense()
    if actual.is_quantized:
        actual, eager = actual.dequantize(), eager.dequantize()

    def wobble() -> torch.Tensor:
        eps = torch.finfo(eager.dtype).eps
        return torch.full(
            eager.shape, 16 * eps * float(eager.abs().nan_to_num(0, 0, 0).max()), dtype=torch.float64
        )

    why = tolerance.judge(
        actual.detach(),
        eager.detach(),
        None if reference is None else reference.detach(),
        "accumulating",
        wobble,
    )
    assert why is None, why


def agree(
    fn: Fn,
    args: Sequence[Any],
    backend: str,
    dynamic: bool | None = None,
    reference: bool = True,
    strides: bool = True,
    fullgraph: bool = False,
) -> Any:
    """Run eager, compiled (twice: the second call takes the fast path) and fp64; compare results, arguments
    and gradients.
    """
    given, wide = copied(list(args)), double(copied(list(args)))
    eager = fn(*given)
    ref: Any = None
    if reference:
        big = copy.deepcopy(fn).double() if isinstance(fn, nn.Module) else fn
        ref = tensors(big(*wide))
    compiled = torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=fullgraph)
    for _ in range(2):
        mine = copied(list(args))
        actual = compiled(*mine)
        assert len(tensors(actual)) == len(tensors(eager))
        assert type(actual) is type(eager)
        for i, (a, e) in enumerate(zip(tensors(actual), tensors(eager), strict=True)):
            accurate(a, e, ref[i] if ref is not None and ref[i].shape == e.shape else None)
            if strides and a.layout == torch.strided and a.numel():
                assert [s for s, n in zip(a.stride(), a.shape) if n > 1] == [
                    s for s, n in zip(e.stride(), e.shape) if n > 1
                ]
        for a, e in zip(tensors(mine), tensors(given), strict=True):
            accurate(a, e, None)
    _same_gradients(fn, tensors(given), tensors(eager), tensors(mine), tensors(actual), tensors(wide), ref)
    return compiled


def _same_gradients(
    fn: Fn,
    given: list[torch.Tensor],
    eager: list[torch.Tensor],
    mine: list[torch.Tensor],
    actual: list[torch.Tensor],
    wide: list[torch.Tensor],
    ref: list[torch.Tensor] | None,
) -> None:
    def grads(outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        wanted, through = [t for t in ins if t.requires_grad], [o for o in outs if o.requires_grad]
        if not wanted or not through:
            return []
        total = sum((o.real if o.is_complex() else o).double().sum() * (i + 1) for i, o in enumerate(through))
        return list(torch.autograd.grad(total, wanted, allow_unused=True))

    theirs, ours = grads(eager, given), grads(actual, mine)
    refs = grads(ref, wide) if ref is not None and theirs else []
    for i, (a, e) in enumerate(zip(ours, theirs, strict=True)):
        assert (a is None) == (e is None)
        if a is not None and e is not None:
            accurate(a, e, refs[i] if refs else None)


def r(*shape: int, grad: bool = False, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_(grad)


# ---- autocast ----


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 32), nn.Linear(32, 16), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("inside", (True, False))
def test_autocast(backend: str, dtype: torch.dtype, inside: bool) -> None:
    block = Block()

    def cast(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return block(x)

    x = r(4, 16)
    eager, ref = cast(x), copy.deepcopy(block).double()(x.double())
    if inside:
        actual = torch.compile(cast, backend=backend)(x)
    else:
        with torch.autocast("cpu", dtype=dtype):
            actual = torch.compile(block, backend=backend)(x)
    assert actual.dtype == eager.dtype
    # The result is fp32, but what is computed in half precision sets its accuracy.
    assert (actual - ref).abs().max() <= 2 * (eager - ref).abs().max() + torch.finfo(
        dtype
    ).eps * ref.abs().max()


def test_autocast_turned_off_inside(backend: str) -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ w
            with torch.autocast("cpu", enabled=False):
                z = x @ w
        return y, z

    compiled = torch.compile(f, backend=backend)
    for a, e in zip(compiled(x := r(4, 8), w := r(8, 8)), f(x, w), strict=True):
        accurate(a, e, None)


# ---- torch.func ----


def test_vmap(backend: str) -> None:
    agree(
        lambda x, w: torch.vmap(lambda row: torch.softmax(w @ row, 0).sum() + row.max())(x),
        [r(5, 4), r(3, 4)],
        backend,
    )


def test_nested_vmap(backend: str) -> None:
    agree(
        lambda x, y: torch.vmap(torch.vmap(torch.dot), in_dims=(0, None))(x, y),
        [r(3, 5, 4), r(5, 4)],
        backend,
    )


def test_func_grad(backend: str) -> None:
    agree(lambda x: torch.func.grad(lambda t: (t.sin() * t).sum())(x), [r(7)], backend)


def test_grad_of_grad(backend: str) -> None:
    agree(
        lambda x: torch.func.grad(lambda t: torch.func.grad(lambda s: (s**3).sum())(t).sum())(x),
        [r(7)],
        backend,
    )


def test_vmap_of_grad(backend: str) -> None:
    agree(
        lambda x, w: torch.vmap(torch.func.grad(lambda a, b: torch.tanh(a @ b).sum()), (0, None))(x, w),
        [r(6, 4), r(4, 3)],
        backend,
    )


def test_jvp(backend: str) -> None:
    agree(lambda x, t: torch.func.jvp(lambda a: a.exp().cumsum(0), (x,), (t,)), [r(5), r(5)], backend)


def test_jacfwd_jacrev(backend: str) -> None:
    agree(
        lambda x: (
            torch.func.jacrev(lambda a: a.sin() * a.sum())(x),
            torch.func.jacfwd(lambda a: a.cos() * a[0])(x),
        ),
        [r(4)],
        backend,
    )


def test_hessian(backend: str) -> None:
    agree(lambda x: torch.func.hessian(lambda a: (a.sin().sum()) ** 2)(x), [r(3)], backend)


def test_functional_call(backend: str) -> None:
    model = nn.Linear(4, 3)

    def f(weight: torch.Tensor, bias: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, {"weight": weight, "bias": bias}, (x,))

    agree(f, [r(3, 4, grad=True), r(3, grad=True), r(2, 4)], backend)


# ---- custom functions and operators ----


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        # Not the true derivative: whoever ignores this function is found out.
        return g * x * 7


class ClampedWithMask(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, low: float) -> tuple[torch.Tensor, torch.Tensor]:
        keep = x > low
        ctx.save_for_backward(keep)
        ctx.mark_non_differentiable(keep)
        return torch.where(keep, x, low), keep

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor, _: Any) -> tuple[torch.Tensor, None]:
        (keep,) = ctx.saved_tensors
        return g * keep, None


def test_custom_autograd_function(backend: str) -> None:
    agree(lambda x: Cube.apply(x.sin()) + 1, [r(5, 3, grad=True)], backend)


def test_custom_autograd_function_with_two_results(backend: str) -> None:
    agree(lambda x: ClampedWithMask.apply(x * 2, 0.25), [r(5, 3, grad=True)], backend)


@torch.library.custom_op("dicp_test::scaled_sort", mutates_args=())
def scaled_sort(x: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.sort(x * scale).values


@scaled_sort.register_fake
def _(x: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("dicp_test::bump", mutates_args=("x",))
def bump(x: torch.Tensor, by: float) -> None:
    x.add_(by)


@torch.library.custom_op("dicp_test::square", mutates_args=())
def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


square.register_fake(lambda x: torch.empty_like(x))
square.register_autograd(
    lambda ctx, g: g * 2 * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


def test_custom_op(backend: str) -> None:
    agree(lambda x: scaled_sort(x + 1, 2.0) * 3, [r(6)], backend, fullgraph=True)


def test_custom_op_that_mutates(backend: str) -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        bump(y, 0.5)
        bump(x, 1.0)
        return y + x, y.sum()

    agree(f, [r(6)], backend, fullgraph=True)


def test_custom_op_with_gradient(backend: str) -> None:
    agree(lambda x: square(x.sin()).sum(0), [r(4, 3, grad=True)], backend, fullgraph=True)


KEPT: list[torch.Tensor] = []


@torch.library.custom_op("dicp_test::keep", mutates_args=())
def keep(x: torch.Tensor) -> torch.Tensor:
    KEPT.append(x)
    return x * 1


keep.register_fake(torch.empty_like)


def over_a_kernels(x: torch.Tensor) -> torch.Tensor:
    """Whose memory the next kernel would have, where nobody kept it."""
    y = x * 2
    return keep(y).sum() + (y + 1).sin().softmax(0)


def over_a_librarys(x: torch.Tensor) -> torch.Tensor:
    image, window = x.view(1, 3, 16, 48), x.view(-1)[:81].view(3, 3, 3, 3)
    y = F.conv2d(image, window, padding=1)
    return keep(y).sum() + F.conv2d((y + 1).sin(), window)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("f", [over_a_kernels, over_a_librarys])
def test_a_custom_op_may_keep_what_it_is_given(f: Any, dynamic: bool, backend: str) -> None:
    """As a collective does until it is waited for. Nothing is written there, in no later call either."""
    torch._dynamo.reset()
    KEPT.clear()
    given = [r(48, 48), r(48, 48)]
    compiled = torch.compile(f, backend=backend, dynamic=dynamic, fullgraph=True)
    got = [compiled(x) for x in given]
    mine = KEPT[:]
    KEPT.clear()
    torch.testing.assert_close(got, [f(x) for x in given], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(mine, KEPT, rtol=1e-3, atol=1e-3)


@torch.library.custom_op("dicp_test::nested", mutates_args=())
def nested(x: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor, list[torch.Tensor]]:
    return [x.clone()], x * 2, [x + 1, x + 2]


nested.register_fake(lambda x: ([torch.empty_like(x)], torch.empty_like(x), [torch.empty_like(x) for _ in "12"]))


def test_custom_op_that_returns_lists(backend: str) -> None:
    def f(x: torch.Tensor) -> Any:
        a, b, c = nested(x.sin())
        return a[0] * 2, b, c[1] + b

    agree(f, [r(4, 5)], backend, fullgraph=True)


# ---- control flow ----


@pytest.mark.parametrize("sign", (1.0, -1.0))
def test_cond(backend: str, sign: float) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda t: t.sin() * 2, lambda t: t.cos() - 1, (x,)) + 1

    agree(f, [r(6).abs() * sign], backend)


def test_cond_with_gradient(backend: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda t: t.sin() * 2, lambda t: t**2, (x,)).sum()

    agree(f, [r(6, grad=True)], backend)


def test_while_loop(backend: str) -> None:
    from torch._higher_order_ops.while_loop import while_loop

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return while_loop(lambda i, a: i < 5, lambda i, a: (i + 1, a * 0.5 + i), (torch.tensor(0), x))

    agree(f, [r(4)], backend)


def test_scan(backend: str) -> None:
    from torch._higher_order_ops.scan import scan

    def f(x: torch.Tensor, init: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return scan(lambda c, v: (c * 0.5 + v, (c + v).sin()), init, x, dim=0)

    agree(f, [r(7, 3), r(3)], backend)


def test_associative_scan(backend: str) -> None:
    from torch._higher_order_ops.associative_scan import associative_scan

    agree(
        lambda x: associative_scan(lambda a, b: a + b, x, dim=0, combine_mode="generic"), [r(8, 3)], backend
    )


def test_jagged_tensors(backend: str) -> None:
    """Of which a size is no number, but stands for the lengths of all parts."""
    layer = torch.nn.Linear(4, 6)

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(layer(x)).softmax(-1)

    torch._dynamo.reset()
    compiled = torch.compile(f, backend=backend)
    for lengths in ((3, 5), (4, 1, 2)):
        parts = [torch.randn(n, 4) for n in lengths]
        got, want = (torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True) for _ in "12")
        y, expected = compiled(got), f(want)
        torch.testing.assert_close(y.values(), expected.values())
        for each in (y, expected):
            each.values().square().sum().backward()
        torch.testing.assert_close(got.grad.values(), want.grad.values())


def test_python_branch_on_data(backend: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return y.sin() if y.sum() > 0 else y.cos()

    agree(f, [r(5).abs()], backend)
    agree(f, [-r(5).abs()], backend)


# ---- containers ----


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclasses.dataclass
class Box:
    inside: torch.Tensor
    name: str


def test_nested_containers(backend: str) -> None:
    def f(d: dict[str, Any]) -> dict[str, Any]:
        total = d["a"] + d["b"][0] * d["b"][1]["c"]
        return {
            "sum": total,
            "list": [total.sin(), (total.cos(), d["a"])],
            "none": None,
            "number": 3,
            "text": "x",
        }

    x = {"a": r(3), "b": [r(3), {"c": r(3)}]}
    compiled = torch.compile(f, backend=backend)
    a, e = compiled(x), f(x)
    assert (
        a.keys() == e.keys()
        and a["none"] is None
        and a["number"] == 3
        and a["text"] == "x"
        and isinstance(a["list"][1], tuple)
    )
    assert a["list"][1][1] is x["a"]
    for p, q in zip(tensors(a), tensors(e), strict=True):
        accurate(p, q, None)


def test_named_tuple_and_dataclass(backend: str) -> None:
    def f(p: Pair, b: Box) -> tuple[Pair, Box, collections.OrderedDict[str, torch.Tensor]]:
        return (
            Pair(p.left + b.inside, p.right * 2),
            Box(b.inside.sin(), b.name + "!"),
            collections.OrderedDict(z=p.left.exp(), a=p.right.neg()),
        )

    p, b = Pair(r(3), r(3)), Box(r(3), "box")
    a, e = torch.compile(f, backend=backend)(p, b), f(p, b)
    assert (
        isinstance(a[0], Pair) and isinstance(a[1], Box) and a[1].name == "box!" and list(a[2]) == ["z", "a"]
    )
    for m, n in zip(tensors(a), tensors(e), strict=True):
        accurate(m, n, None)


def test_results_that_are_inputs_constants_and_each_other(backend: str) -> None:
    def f(x: torch.Tensor) -> tuple[Any, ...]:
        y = x + 1
        return x, y, y, y[1:], x.t(), 5, torch.tensor(2.5), y.view(-1)

    x = r(3, 4)
    a = torch.compile(f, backend=backend)(x)
    assert a[0] is x and a[5] == 5
    assert a[1].data_ptr() == a[2].data_ptr() == a[7].data_ptr()
    assert a[3].data_ptr() == a[1].data_ptr() + 4 * 4
    assert a[4].data_ptr() == x.data_ptr() and a[4].stride() == (1, 4)
    for m, n in zip(tensors(a), tensors(f(x)), strict=True):
        accurate(m, n, None)


def test_an_empty_graph_and_no_tensor_arguments(backend: str) -> None:
    assert torch.compile(lambda x: x, backend=backend)(t := r(2)) is t
    assert torch.equal(torch.compile(lambda: torch.arange(5) * 2, backend=backend)(), torch.arange(5) * 2)


# ---- recurrent networks ----


@pytest.mark.parametrize("kind", (nn.RNN, nn.LSTM, nn.GRU))
@pytest.mark.parametrize(
    "extra", ({}, {"num_layers": 2, "bidirectional": True}, {"batch_first": True, "bias": False})
)
def test_rnn(backend: str, kind: type[nn.RNNBase], extra: dict[str, Any]) -> None:
    agree(kind(4, 6, **extra), [r(3, 2, 4)], backend)


@pytest.mark.parametrize("cell", (nn.LSTMCell, nn.GRUCell, nn.RNNCell))
def test_rnn_cell_loop(backend: str, cell: type[nn.Module]) -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = cell(4, 6)  # type: ignore[call-arg]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state = None
            for step in x:
                state = self.cell(step, state)
            return state[0] if isinstance(state, tuple) else state

    agree(Loop(), [r(3, 2, 4, grad=True)], backend)


def test_lstm_gradient(backend: str) -> None:
    agree(nn.LSTM(4, 6), [r(3, 2, 4, grad=True)], backend)


def test_transformer_layer(backend: str) -> None:
    agree(
        nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True),
        [r(2, 5, 16, grad=True)],
        backend,
    )


def encoder_layer(**how: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, **how).eval()


# Which positions take no part: of 2 sequences of 5, of 2 heads each.
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"src_mask": torch.ones(5, 5).triu(1).bool()},
    "keys": {"src_key_padding_mask": torch.arange(5) >= torch.tensor([[3], [5]])},
    "heads": {"src_mask": (torch.arange(100) % 7 == 3).view(4, 5, 5)},
    "added": {"src_mask": torch.full((5, 5), -math.inf).triu(1)},
    "causal, keys": {
        "src_mask": torch.ones(5, 5).triu(1).bool(),
        "src_key_padding_mask": torch.arange(5) >= torch.tensor([[3], [5]]),
    },
    "no key": {"src_key_padding_mask": torch.arange(5) >= torch.tensor([[0], [4]])},
}


@pytest.mark.parametrize("how", ({}, {"norm_first": True, "activation": "gelu"}), ids=("post", "pre"))
@pytest.mark.parametrize("mask", MASKS)
def test_transformer_layer_in_inference(backend: str, how: dict[str, Any], mask: str) -> None:
    """There its module calls one operator, whose softmax makes NaN of a row without a key."""
    layer = encoder_layer(**how)
    with torch.no_grad():
        agree(lambda x: layer(x, **MASKS[mask]), [r(2, 5, 16)], backend, reference=False)


def test_transformer_layer_of_any_length(backend: str) -> None:
    layer = encoder_layer()
    compiled = torch.compile(layer, backend=backend, dynamic=True)
    with torch.no_grad():
        for batch, length in ((2, 5), (3, 9), (1, 1)):
            x, closed = r(batch, length, 16), torch.arange(length) > torch.randint(length, (batch, 1))
            expected = layer(x, src_key_padding_mask=closed)
            accurate(compiled(x, src_key_padding_mask=closed), expected, None)


# ---- FFT, linear algebra, sparse, quantised: calls back to aten ----


def test_fft_chain(backend: str) -> None:
    agree(lambda x: torch.fft.irfft(torch.fft.rfft(x * 2) * 1j, n=8).relu() + 1, [r(3, 8)], backend)


def test_complex_arithmetic(backend: str) -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = torch.complex(x, x + 1)
        return (z * z.conj()).real, z.abs(), torch.view_as_real(z.exp()), z.angle(), (z @ z.mH).imag

    agree(f, [r(3, 3)], backend)


def test_linalg_chain(backend: str) -> None:
    def f(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        spd = a @ a.mT + 4 * torch.eye(4)
        return (
            torch.linalg.solve(spd, b).tanh(),
            torch.linalg.cholesky(spd),
            torch.logdet(spd),
            torch.linalg.inv(spd) * 2,
        )

    agree(f, [r(4, 4), r(4, 2)], backend, reference=False)


def test_linalg_gradient(backend: str) -> None:
    agree(
        lambda a: torch.linalg.inv(a @ a.mT + 4 * torch.eye(4, dtype=a.dtype)).sum(0),
        [r(4, 4, grad=True)],
        backend,
    )


def test_sparse_inside(backend: str) -> None:
    agree(lambda x, y: torch.sparse.mm(x.relu().to_sparse(), y) + 1, [r(4, 5), r(5, 3)], backend)


def test_sparse_argument(backend: str) -> None:
    x, y = r(4, 5).relu().to_sparse(), r(5, 3)
    f = torch.compile(lambda a, b: (torch.sparse.mm(a, b) * 2).sin(), backend=backend)
    accurate(f(x, y), (torch.sparse.mm(x, y) * 2).sin(), None)


def test_quantised(backend: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        q = torch.quantize_per_tensor(x * 2, 0.1, 10, torch.quint8)
        return q.dequantize() + 1

    agree(f, [r(4, 5)], backend, reference=False)


QUANTIZED = torch.ops.quantized_decomposed
BYTES, SIGNED = (0, 255, torch.uint8), (-128, 127, torch.int8)


def _by_numbers(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> Any:
    q = QUANTIZED.quantize_per_tensor(x.relu(), 0.03, 3, *BYTES)
    return q, QUANTIZED.dequantize_per_tensor(q, 0.03, 3, *BYTES)


def _by_tensors(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> Any:
    q = QUANTIZED.quantize_per_tensor.tensor(x, scale[0], zero[:1], *SIGNED)
    return q, QUANTIZED.dequantize_per_tensor.tensor(q, scale[:1], zero[0], *SIGNED)


def _by_channels(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> Any:
    q = QUANTIZED.quantize_per_channel(x, scale, zero, 1, *SIGNED)
    return q, QUANTIZED.dequantize_per_channel(q, scale, zero, 1, *SIGNED)


def _by_tokens(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> Any:
    scales, zeros = (t[:, None].expand(5, 6, 1).contiguous() for t in (scale, zero))
    q = QUANTIZED.quantize_per_token(x, scales, zeros, *SIGNED)
    return q, QUANTIZED.dequantize_per_token(q, scales, zeros, *SIGNED, torch.float32)


def _by_groups(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> Any:
    scales, zeros = scale.view(3, 2), zero.view(3, 2)  # three rows in two groups of 3
    q = QUANTIZED.quantize_per_channel_group(x, scales, zeros, *SIGNED, 3)
    return q, QUANTIZED.dequantize_per_channel_group(q, scales, zeros, *SIGNED, 3, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fn", [_by_numbers, _by_tensors, _by_channels, _by_tokens])
def test_quantised_as_pt2e_does_is_kernels(backend: str, fn: Fn, dtype: torch.dtype) -> None:
    """The very numbers of eager, also of what saturates."""
    x = (4 * torch.randn(5, 6, 7)).to(dtype)
    x[0, 0, :2] = torch.tensor([torch.inf, -torch.inf])
    scale, zero = torch.rand(6) + 0.01, torch.randint(-5, 5, (6,))
    counters.clear()
    got = torch.compile(fn, backend=backend, fullgraph=True)(x, scale, zero)
    assert counters["dicp"]["kernels"] and not counters["dicp"]["extern"]
    for mine, eager in zip(got, fn(x, scale, zero), strict=True):
        assert mine.dtype == eager.dtype and torch.equal(mine, eager)


def test_quantised_by_groups_is_a_call_in_one_graph(backend: str) -> None:
    """torch's definition asks on the host whether there is a NaN: taken apart it would break the graph."""
    x, scale, zero = torch.randn(3, 6), torch.rand(6) + 0.01, torch.randint(-5, 5, (6,))
    got = torch.compile(_by_groups, backend=backend, fullgraph=True)(x, scale, zero)
    for mine, eager in zip(got, _by_groups(x, scale, zero), strict=True):
        assert mine.dtype == eager.dtype and torch.equal(mine, eager)


def test_quantised_beyond_a_dtype_is_refused_as_eager_does(backend: str) -> None:
    x, one = torch.randn(4), torch.ones(1)
    with pytest.raises(Exception, match="out of bounds?"):
        torch.compile(QUANTIZED.quantize_per_tensor.tensor, backend=backend)(x, one, one.int(), 0, 300, torch.uint8)


def test_fake_quantise(backend: str) -> None:
    agree(
        lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127) * 2,
        [r(4, 5, grad=True)],
        backend,
    )


# ---- several dtypes and devices ----


def test_many_dtypes_in_one_graph(backend: str) -> None:
    def f(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> tuple[torch.Tensor, ...]:
        m = d > 0
        return (
            a + b,
            a * c,
            torch.where(m, a, b.float()),
            (c + d).to(torch.int8),
            a.double().sum() + b.sum(),
            m.sum(),
            (b.float() + a).bfloat16(),
            c / 3,
            d // 2,
        )

    agree(
        f,
        [
            r(4, 5),
            r(4, 5).bfloat16(),
            torch.arange(20).reshape(4, 5),
            torch.arange(-10, 10, dtype=torch.int32).reshape(4, 5),
        ],
        backend,
        reference=False,
    )


def test_scalars_promote_as_in_eager(backend: str) -> None:
    def f(i: torch.Tensor, h: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            i + 1.5,
            h + 1,
            h * s,
            i * s,
            i / 2,
            i // 2,
            i**2,
            2**i,
            h**0.5,
            True + i,
            s + i,
            torch.true_divide(i, 3),
        )

    agree(
        f,
        [torch.arange(1, 7), r(6).abs().bfloat16(), torch.tensor(2.5, dtype=torch.float64)],
        backend,
        reference=False,
    )


def test_meta_device_beside_cpu(backend: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        shape_only = torch.empty(x.shape[0], 7, device="meta") @ torch.empty(7, 2, device="meta")
        return x.new_full(shape_only.shape, 2.0) + x[:, :2]

    agree(f, [r(3, 4)], backend)


# ---- graph breaks, several functions, threads ----


def test_graph_breaks(backend: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.sin() + 1
        torch._dynamo.graph_break()
        z = y * x
        if z.sum().item() > 1e9:
            return z
        return torch.relu(z) + len(z.tolist())

    agree(f, [r(4, 4, grad=True)], backend)


def test_item_and_data_dependent_sizes(backend: str) -> None:
    agree(
        lambda x: x[x > 0].sum() + torch.nonzero(x).shape[0] + torch.unique(x.round()).numel(),
        [r(20)],
        backend,
        reference=False,
    )


def test_mutation_through_views(backend: str) -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        v = x[1:]
        v.mul_(2)
        x[:, 0] = y
        w = x.t()
        w.add_(1)
        y.zero_()
        return v, w.sum(0)

    agree(f, [r(4, 3), r(4)], backend)


def test_module_buffers_are_written(backend: str) -> None:
    def fresh_model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU())

    mine, theirs, x = fresh_model(), fresh_model(), r(2, 2, 6, 6)
    compiled = torch.compile(mine, backend=backend)
    for _ in range(3):
        accurate(compiled(x), theirs(x), None)
    for a, e in zip(mine.state_dict().values(), theirs.state_dict().values(), strict=True):
        accurate(a, e, None)
    mine.eval(), theirs.eval()
    accurate(compiled(x), theirs(x), None)


def test_weights_may_change_between_calls(backend: str) -> None:
    model, x = nn.Linear(4, 4), r(2, 4)
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        for scale in (1.0, 2.0, -3.0):
            model.weight.data.mul_(scale)
            model.bias.add_(scale)
            accurate(compiled(x), model(x), None)


def test_several_compiled_functions_alive(backend: str) -> None:
    made = [torch.compile(lambda x, k=k: (x * k).sin().sum(k % 2), backend=backend) for k in range(6)]
    x = r(3, 3)
    for _ in range(2):
        for k, f in enumerate(made):
            accurate(f(x), (x * k).sin().sum(k % 2), None)


def test_results_survive_the_next_call(backend: str) -> None:
    f = torch.compile(lambda x: (x * 2, x.sum(0)), backend=backend)
    first = f(torch.ones(64, 64))
    f(torch.zeros(64, 64))
    assert bool((first[0] == 2).all()) and bool((first[1] == 64).all())


def test_two_forwards_before_their_backwards(backend: str) -> None:
    f = torch.compile(lambda x: torch.softmax(x.exp(), -1) * x, backend=backend)
    xs = [r(4, 5, grad=True) for _ in range(3)]
    outs = [f(x) for x in xs]
    for x, out in reversed(list(zip(xs, outs, strict=True))):
        (got,) = torch.autograd.grad(out.sum(), x)
        y = x.detach().requires_grad_()
        (want,) = torch.autograd.grad((torch.softmax(y.exp(), -1) * y).sum(), y)
        accurate(got, want, None)


def test_compiled_inside_compiled(backend: str) -> None:
    inner = torch.compile(lambda x: x.sin() + 1, backend=backend)
    agree(lambda x: inner(x) * inner(x * 2), [r(5, grad=True)], backend)


def test_threads(backend: str) -> None:
    f = torch.compile(lambda x: torch.softmax(x @ x.mT, -1).sum(0), backend=backend)
    inputs = [r(16, 16) for _ in range(8)]
    f(inputs[0])
    found: dict[int, torch.Tensor] = {}

    def work(k: int) -> None:
        for _ in range(20):
            found[k] = f(inputs[k])

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for k, x in enumerate(inputs):
        accurate(found[k], torch.softmax(x @ x.mT, -1).sum(0), None)


# ---- dynamic sizes ----


@pytest.mark.parametrize("dynamic", (True, None))
def test_sizes_change(backend: str, dynamic: bool | None) -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        y = F.layer_norm(x @ w, (w.shape[1],))
        return torch.cat([y, y[:, 1:]], 1).softmax(-1), (y * y).reshape(-1, 2).sum(0), x.shape[0] * 2

    compiled = torch.compile(f, backend=backend, dynamic=dynamic)
    for n in (3, 4, 7, 1, 0, 16):
        x, w = r(2, n, 6), r(6, 8)
        a, e = compiled(x, w), f(x, w)
        assert a[2] == e[2]
        for m, q in zip(tensors(a), tensors(e), strict=True):
            accurate(m, q, None)


def test_integer_arguments_change(backend: str) -> None:
    def f(x: torch.Tensor, k: int, s: float) -> torch.Tensor:
        return (x[:k] * s).sum(0) + k

    compiled = torch.compile(f, backend=backend)
    for k in (1, 2, 3, 5):
        accurate(compiled(x := r(6, 3), k, 0.5 * k), f(x, k, 0.5 * k), None)


def test_training_steps(backend: str) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 4))
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    (mine, step), (theirs, their_step) = make(), make()
    compiled = torch.compile(mine, backend=backend)
    for k in range(4):
        x, y = r(6, 8), torch.randint(0, 4, (6,))
        for model, opt in ((compiled, step), (theirs, their_step)):
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
        for a, e in zip(mine.parameters(), theirs.parameters(), strict=True):
            assert torch.allclose(a, e, rtol=1e-4, atol=1e-5), k


def test_checkpointing(backend: str) -> None:
    from torch.utils.checkpoint import checkpoint

    agree(
        lambda x: checkpoint(lambda t: (t.sin().exp() * t).relu(), x, use_reentrant=False).sum(0),
        [r(4, 5, grad=True)],
        backend,
    )


def test_hooks_and_retained_gradients(backend: str) -> None:
    f = torch.compile(lambda x: (x * x).sin(), backend=backend)
    x = r(5, grad=True)
    y = f(x)
    y.register_hook(lambda g: g * 3)
    y.sum().backward()
    z = x.detach().requires_grad_()
    (z * z).sin().sum().backward()
    assert x.grad is not None and z.grad is not None
    accurate(x.grad, z.grad * 3, None)


def test_inference_mode_and_no_grad(backend: str) -> None:
    f = torch.compile(lambda x: (x * 2).cos(), backend=backend)
    x = r(5, grad=True)
    with torch.inference_mode():
        a = f(x)
    assert not a.requires_grad
    with torch.no_grad():
        assert not f(x).requires_grad
    assert f(x).requires_grad


def test_user_errors_surface_as_in_eager(backend: str) -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x @ y

    with pytest.raises(Exception) as theirs:
        f(r(2, 3), r(4, 5))
    with pytest.raises(Exception) as mine:
        torch.compile(f, backend=backend)(r(2, 3), r(4, 5))
    assert str(theirs.value).split(":")[0][:20] in str(mine.value) or isinstance(
        mine.value, type(theirs.value)
    )


ONE_VALUE: dict[str, Callable[..., torch.Tensor]] = {
    "take": lambda x, i: x[:, :1].take(i) + 1,
    "index_select": lambda x, i: x[0, 0].index_select(0, i) + 1,
    "gather": lambda x, i: x[0, 0].gather(0, i[0]) + 1,
    "index": lambda x, i: torch.zeros(4)[i] + x[0, 0],
    "embedding": lambda x, i: F.embedding(i, torch.ones(3, 2)) + x[0, 0],
    "expand": lambda x, i: x[:, :1].expand(4, 4)[i].sum(),
}


@pytest.mark.parametrize("name", ONE_VALUE)
def test_index_out_of_range_raises_where_all_elements_are_one(name: str) -> None:
    torch._dynamo.reset()
    f, x = ONE_VALUE[name], r(1, 4)
    compiled = torch.compile(f, backend="dicp_cpu", fullgraph=True)
    torch.testing.assert_close(compiled(x, torch.tensor([0])), f(x, torch.tensor([0])))
    with pytest.raises(IndexError):
        compiled(x, torch.tensor([5]))


def test_index_out_of_range_raises(backend: str) -> None:
    f = torch.compile(lambda x, i: x[i] + 1, backend=backend)
    f(r(4), torch.tensor([0, 3]))
    with pytest.raises((IndexError, RuntimeError)):
        f(r(4), torch.tensor([0, 9]))

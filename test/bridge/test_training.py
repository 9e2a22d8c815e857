"""Training: results, gradients and buffers against eager."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from checks import check, check_training, compiles
from torch import nn


def r(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(2, 5, 3, 2, 8).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 5, 16)


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.max_pool2d(F.relu(self.norm(self.conv(x))), 2).mean((2, 3))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)

    def forward(self, i: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.embed(i)).view(-1, 20), i.view(-1).roll(1))


class Shared(nn.Module):
    """One weight used twice, one not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.unused = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x @ self.w
        return torch.tanh(y) @ self.w, y.detach()


MODELS = {
    "residual": (Residual, r(2, 5, 16).requires_grad_()),
    "attention": (Attention, r(2, 5, 16)),
    "conv": (Conv, r(2, 3, 12, 12).requires_grad_()),
    "words": (Words, torch.randint(0, 20, (2, 7))),
    "shared": (Shared, r(4, 6).requires_grad_()),
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_agree_with_eager(name: str) -> None:
    model, *args = MODELS[name]
    torch.manual_seed(0)
    with compiles() as found:
        check_training(model(), *args, fullgraph=True)
    assert [c.role for c in found] == ["forward", "backward"]


def test_backward_in_bfloat16_is_as_near_to_exact_as_eagers() -> None:
    torch.manual_seed(0)
    exact = Residual().double()
    x = r(64, 16)

    def gradients(model: nn.Module, x: torch.Tensor, fn: nn.Module) -> list[torch.Tensor]:
        model.zero_grad()
        fn(x).square().sum().backward()
        return [p.grad.double() for p in model.parameters()]

    low = Residual().bfloat16()
    low.load_state_dict(exact.state_dict())
    exact.load_state_dict(low.state_dict())
    x = x.bfloat16()
    want = gradients(exact, x.double(), exact)
    eager = gradients(low, x, low)
    mine = gradients(low, x, torch.compile(low, backend="dicp_cpu"))
    for e, m, w in zip(eager, mine, want, strict=True):
        assert (m - w).norm() <= 2 * (e - w).norm() + 1e-6 * w.norm()


@pytest.mark.parametrize("columns", [1, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norm_of_equal_elements_has_no_spurious_gradient(dtype: torch.dtype, columns: int) -> None:
    """x - mean is 0 there only if both are of the same rounding of x, and anything else times 1 / sqrt(eps)."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(F.gelu(x), (columns,)).sin()

    torch.manual_seed(0)
    x = r(3000, 1).expand(3000, columns).to(dtype)
    grads = []
    for fn in (f, torch.compile(f, backend="dicp_cpu", fullgraph=True)):
        leaf = x.clone(memory_format=torch.contiguous_format).requires_grad_()
        y = fn(leaf)
        y.backward(torch.linspace(0, 1, y.numel()).view(y.shape).to(dtype))
        grads.append(leaf.grad.float())
    assert (grads[1] - grads[0]).abs().max() <= 0.02 * grads[0].abs().max(), (grads[1] - grads[0]).abs().max()


def swish(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


EXTREMES = {
    "amax": lambda x: (x.tanh() * x.exp()).amax(-1),
    "max": lambda x: swish(x * 1.5).max(),
    "amin": lambda x: swish(x * 1.5 + 1).amin(0),
    "largest_magnitude": lambda x: torch.linalg.vector_norm(swish(x), float("inf"), dim=-1),
    "scaled": lambda x: (y := F.layer_norm(x, (64,)) * x) / y.abs().amax(-1, keepdim=True),
    "maximum": lambda x: torch.maximum(swish(x), swish(x * 1.5)).amax(0),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", EXTREMES)
def test_the_backward_finds_the_largest_that_the_forward_found(name: str, dtype: torch.dtype) -> None:
    """It looks for what is equal to it, in values that it makes again."""
    fn, x = EXTREMES[name], torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).to(dtype)

    def gradient(f, x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(f(x).float().sum(), x)[0].double()

    exact = gradient(fn, x.double())
    mine, eager = (gradient(f, x) for f in (torch.compile(fn, backend="dicp_cpu", fullgraph=True), fn))
    assert (mine - exact).norm() <= 2 * (eager - exact).norm() + 1e-6 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(15, 7), (3, 35), (300, 7)])
def test_each_copy_of_an_expression_gives_the_same_bits(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Of two products and their sum, in the forward and the backward, and in two loops of one kernel."""
    torch.manual_seed(0)
    a, b = (torch.randn(shape, dtype=dtype) for _ in range(2))
    smallest = torch.compile(lambda a, b: (a * a + b * b).amin(0), backend="dicp_cpu", fullgraph=True)
    x = a.clone().requires_grad_()
    (got,) = torch.autograd.grad(smallest(x, b).sum(), x)
    assert got.isfinite().all() and torch.equal((got != 0).sum(0), torch.ones(shape[1], dtype=torch.int64))

    @torch.compile(backend="dicp_cpu", fullgraph=True)
    def held(a, b):
        z = a * a + b * b
        largest = z.amax(0)
        return (z == largest).any(0), z > largest

    found, above = held(a, b)
    assert found.all() and not above.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_limited_to_its_largest_keeps_its_gradient(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(128, 512).to(dtype).requires_grad_() for _ in range(2))

    def fn(a, b):
        z = F.gelu(a + b)
        return z.clamp(max=z.amax(-1, keepdim=True).detach())

    got = torch.compile(fn, backend="dicp_cpu", fullgraph=True)(a, b)
    largest = got.detach() == got.detach().amax(-1, keepdim=True)
    (grad,) = torch.autograd.grad(got.sum(), a)
    assert not ((grad == 0) & largest).any()


@pytest.mark.parametrize("act", [F.hardswish, F.elu, F.selu, F.celu], ids=lambda f: f.__name__)
def test_the_gradient_at_nan_is_nan(act) -> None:
    x = torch.full((64,), float("nan"), requires_grad=True)
    (got,) = torch.autograd.grad(torch.compile(act, backend="dicp_cpu")(x).sum(), x)
    assert got.isnan().all()


def test_two_forwards_before_the_backwards() -> None:
    w = r(6, 6).requires_grad_()
    f = torch.compile(lambda x, w: torch.tanh(x @ w).exp(), backend="dicp_cpu")
    xs = [r(3, 6) for _ in range(3)]
    outs = [f(x, w) for x in xs]
    for out in reversed(outs):
        out.sum().backward()
    mine, w.grad = w.grad, None
    for x in xs:
        torch.tanh(x @ w).exp().sum().backward()
    torch.testing.assert_close(mine, w.grad, rtol=1e-4, atol=1e-4)


def test_backward_twice_with_retained_graph() -> None:
    w = r(6).requires_grad_()
    out = torch.compile(lambda w: (w.exp() * w).sum(), backend="dicp_cpu")(w)
    out.backward(retain_graph=True)
    first = w.grad.clone()
    out.backward()
    torch.testing.assert_close(w.grad, 2 * first)


def test_gradient_of_a_strided_output() -> None:
    """The incoming gradient has strides nobody saw while tracing."""
    w = r(5, 6).requires_grad_()
    for make in (
        lambda s: torch.ones(s[::-1]).t(),
        lambda s: torch.ones(1).expand(s),
        lambda s: torch.ones(s),
    ):
        f = torch.compile(lambda w: (w * w).t(), backend="dicp_cpu")
        out = f(w)
        (mine,) = torch.autograd.grad(out, w, make(out.shape))
        torch.testing.assert_close(mine, 2 * w.detach())
        torch._dynamo.reset()


def test_hooks_may_lay_saved_values_out_anew() -> None:
    """The backward took them as they were planned: columns of gradients were exchanged, without a word."""
    x = r(6, 4).t().requires_grad_()
    f = torch.compile(lambda x: x.sin() * x, backend="dicp_cpu", dynamic=True)
    for columns in (4, 5):  # the sizes of both backwards are symbolic
        x = r(6, columns).t().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.contiguous(), lambda t: t):
            y = f(x)
        (mine,) = torch.autograd.grad(y, x, torch.ones(columns, 6))
        torch.testing.assert_close(mine, x.detach().cos() * x.detach() + x.detach().sin())


def test_saved_values_survive_a_later_call() -> None:
    f = torch.compile(lambda x: (x.exp().sin() * x).sum(), backend="dicp_cpu")
    x = r(300).requires_grad_()
    loss = f(x)
    for _ in range(3):
        f(r(300).requires_grad_())
    loss.backward()
    y = x.detach().clone().requires_grad_()
    (y.exp().sin() * y).sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-4)


class Viewed(nn.Module):
    """Its first convolution's result is saved, and seen again as a matrix in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        rows = y.view(-1, 256)
        return self.b(y.relu()).square().mean() + (rows.sin() * torch.linspace(0, 1, 256)).mean()


def test_saved_channels_last_values_may_be_viewed_as_they_were_traced() -> None:
    check_training(Viewed(), r(4, 8, 16, 16).requires_grad_())


@pytest.mark.parametrize("dim", [0, 2])
def test_weight_norm_is_kernels(dim: int) -> None:
    counters = torch._dynamo.utils.counters["dicp"]
    before = counters["extern"]
    model = nn.utils.parametrizations.weight_norm(nn.Conv1d(6, 8, 5), dim=dim)
    check_training(model, r(2, 6, 30).requires_grad_())
    assert counters["extern"] == before


def test_checkpointed_block() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Residual()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.block, x, use_reentrant=False)

    check_training(Checkpointed(), r(2, 5, 16).requires_grad_())


def test_gradients_of_integer_free_inputs_only() -> None:
    check(lambda x, i: (x[i] * 2, i + 1), r(5, 3).requires_grad_(), torch.tensor([1, 2]))


def test_library_results_belong_to_the_caller_alone() -> None:
    """Nobody else holds what a library allocated: it is freed with its last reader, and taken as .grad
    without a copy."""
    model = nn.Sequential(nn.Conv2d(8, 16, 3, bias=False), nn.ReLU(), nn.Conv2d(16, 8, 1, bias=False))
    compiled = torch.compile(model, backend="dicp_cpu")
    y = compiled(r(2, 8, 9, 9))
    assert y._use_count() == 1
    y.sum().backward()
    addresses: list[int] = []
    for p in model.parameters():
        p.register_hook(lambda g: addresses.append(g.data_ptr()))
        p.grad = None
    compiled(r(2, 8, 9, 9)).sum().backward()
    assert {p.grad.data_ptr() for p in model.parameters() if p.grad is not None} == set(addresses)

"""Symbolic sizes: one compile serves every size, and sizes go in and out of graphs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from checks import check, close, compiles

import dicp.compiler
from dicp.schedule.defs import Buffer


def r(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def mlp(x, w, b):
    return F.gelu(F.linear(x, w, b)).softmax(-1) * x.shape[0]


def pooled(x):
    return x.reshape(x.shape[0], -1, 2).mean(-1) + torch.arange(x.shape[1] // 2)


def tokens(w, i):
    return F.embedding(i, w).sum(1) / i.shape[1]


def masked(x):
    n = x.shape[-1]
    mask = torch.full((n, n), -float("inf")).triu(1)
    return (x + mask).softmax(-1)


CASES = {
    "pointwise": (lambda x, y: (x + y).relu() * 2, lambda n: (r(n, 3), r(n, 3))),
    "transposed": (lambda x: x.t() + x.t().exp(), lambda n: (r(n, 5),)),
    "rows": (lambda x: (x.softmax(1), x.sum(1), x.argmax(1)), lambda n: (r(4, n),)),
    "columns": (lambda x: (x.mean(0), x.amax(0)), lambda n: (r(n, 33),)),
    "norm": (lambda x: F.layer_norm(x, x.shape[-1:]), lambda n: (r(3, n),)),
    "mlp": (mlp, lambda n: (r(n, 8), r(16, 8), r(16))),
    "matmul": (lambda x: x @ x.t(), lambda n: (r(n, 12),)),
    "windows_matmul": (lambda x: (y := x.unfold(0, 2, 1)) @ y.mT, lambda n: (r(n + 1),)),
    "batched_matmul": (lambda x: torch.bmm(x, x.mT), lambda n: (r(2, n, 12),)),
    "cat": (lambda x, y: torch.cat([x, y * 2]), lambda n: (r(n, 4), r(2 * n, 4))),
    "slices": (lambda x: (x[1:], x[:-1] + x[1:], x[::2]), lambda n: (r(n + 2, 3),)),
    "reshape": (pooled, lambda n: (r(n, 8),)),
    "gather": (tokens, lambda n: (r(50, 8), torch.randint(0, 50, (2, n)))),
    "triangle": (masked, lambda n: (r(2, n, n),)),
    "flipped_product": (lambda x, y: x @ y.flip(0), lambda n: (r(n, n), r(n, n))),
    "scan": (lambda x: x.cumsum(0), lambda n: (r(n, 3),)),
    "pad": (lambda x: F.pad(x, (1, 2)), lambda n: (r(2, n),)),
    "attention": (
        lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True),
        lambda n: (r(1, 2, n, 8),),
    ),
    "mutation": (lambda x: x.mul_(2).sum(0), lambda n: (r(n, 3),)),
    "two_symbols": (lambda x, y: x[:, None] * y[None], lambda n: (r(n), r(2 * n + 1))),
}


def test_temporaries_of_several_sizes_share_the_arena_whichever_is_the_largest() -> None:
    """What lies on what is decided at the first sizes; the offsets follow the sizes of each call."""

    def chain(x, y, w):
        a = (x.softmax(1) @ w).softmax(1)
        b = (y.softmax(1) @ w).softmax(1)
        return (a @ w).softmax(1).sum(0) @ w + (b @ w).softmax(1).sum(0) @ (a.sum(0) * w)

    programs: list = []
    torch._dynamo.reset()
    compiled = torch.compile(chain, backend="dicp_cpu", dynamic=True, fullgraph=True)
    w = r(32, 32)
    with dicp.compiler.observe(programs.append):
        for n, m in [(200, 30), (30, 200), (64, 64), (1, 9), (200, 30)]:
            x, y = r(n, 32), r(m, 32)
            torch.testing.assert_close(compiled(x, y, w), chain(x, y, w), rtol=1e-4, atol=1e-5)
    plan, text = programs[0].program.plan, programs[0].program.sources["call.py"]
    assert plan.maxima and "@per_size\ndef arena(" in text


def test_saved_activations_of_symbolic_sizes_keep_their_layout() -> None:
    """The backward takes them channels-last, as the forward leaves them."""
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(8, 64, 3, stride=2, padding=1), torch.nn.BatchNorm2d(64), torch.nn.ReLU()]
    layers += [torch.nn.Conv2d(64, 64, 1), torch.nn.BatchNorm2d(64), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers, torch.nn.Conv2d(64, 24, 1), torch.nn.BatchNorm2d(24))
    programs: list = []
    compiled = torch.compile(model, backend="dicp_cpu", dynamic=True, fullgraph=True)
    with dicp.compiler.observe(programs.append):
        for n, side in [(6, 33), (2, 46), (5, 21)]:
            found = []
            for f in (model, compiled):
                model.zero_grad()
                x = r(n, 8, side, side + 2).requires_grad_()
                torch.manual_seed(n)
                x.data.normal_()
                (f(x) * torch.linspace(-1, 1, 24)[:, None, None]).square().mean().backward()
                found.append([x.grad, *(p.grad for p in model.parameters())])
            for ours, eager in zip(found[1], found[0], strict=True):
                torch.testing.assert_close(ours, eager, rtol=1e-3, atol=1e-6)
    assert [p.role for p in programs] == ["forward", "backward"]
    saved = [b for b in programs[1].program.lowered.inputs if isinstance(b, Buffer) and len(b.shape) == 4]
    images = [b for b in saved if not all(isinstance(n, int) for n in b.shape)]
    assert any(b.strides[1] == 1 for b in images), [b.strides for b in images]


def test_what_a_guard_says_is_one_is_broadcast() -> None:
    """The second of two chunks of three columns: n - (n + 1) // 2 of them."""

    def last(x):
        v = torch.full((3,), 1.5)
        return torch.addcmul(v, v, x.chunk(2, -1)[1]) + x.chunk(2, -1)[1].expand(3, 3, 3)

    x = r(3, 3, 3)
    close(torch.compile(last, backend="dicp_cpu", dynamic=True)(x), last(x))


@pytest.mark.parametrize("name", CASES)
def test_one_compile_serves_every_size(name: str) -> None:
    fn, make = CASES[name]
    compiled = torch.compile(fn, backend="dicp_cpu", dynamic=True, fullgraph=True)
    with compiles() as found:
        for n in (6, 7, 16, 33, 100):
            mine = make(n)
            theirs = tuple(t.clone() for t in mine)
            close(compiled(*mine), fn(*theirs), f"size {n}")
            close(mine, theirs, f"arguments at size {n}")
    assert len(found) == 1


def test_conv_recompiles_only_where_torchs_own_rule_does() -> None:
    """torch's shape rule of convolution tells small batches (under 16) from others."""
    compiled = torch.compile(lambda x, w: F.conv2d(x, w, padding=1).relu(), backend="dicp_cpu", dynamic=True)
    w = r(4, 3, 3, 3)
    with compiles() as found:
        for n in (6, 7, 15, 17, 20):
            x = r(n, 3, 8, 9)
            close(compiled(x, w), F.conv2d(x, w, padding=1).relu())
    assert len(found) <= 2


def test_automatic_dynamic_compiles_twice() -> None:
    """The default: static first, symbolic once a size changed."""
    compiled = torch.compile(lambda x: (x * 2).softmax(0), backend="dicp_cpu")
    with compiles() as found:
        for n in (5, 6, 7, 30):
            x = r(n, 3)
            close(compiled(x), (x * 2).softmax(0))
    assert len(found) == 2


def test_dynamic_false_compiles_each_size() -> None:
    compiled = torch.compile(lambda x: x * 2, backend="dicp_cpu", dynamic=False)
    with compiles() as found:
        for n in (5, 6, 7):
            compiled(r(n))
    assert len(found) == 3
    assert not any(c.program.sizes for c in found)


def test_sizes_go_in_and_out() -> None:
    def f(x, k):
        return x * k, x.shape[0] * 2, x.shape[0] + k, x.numel()

    compiled = torch.compile(f, backend="dicp_cpu", dynamic=True)
    with compiles() as found:
        for n, k in ((6, 3), (9, 5), (12, 7)):
            x = r(n, 4)
            got, want = compiled(x, k), f(x, k)
            close(got[0], want[0])
            assert tuple(got[1:]) == want[1:]
    assert len(found) == 1


def test_symbolic_training() -> None:
    def f(x, w):
        return F.layer_norm(x @ w, (5,)).relu().sum(0)

    compiled = torch.compile(f, backend="dicp_cpu", dynamic=True)
    with compiles() as found:
        for n in (6, 9, 21):
            x, w = r(n, 7).requires_grad_(), r(7, 5).requires_grad_()
            a, b = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
            compiled(x, w).square().sum().backward()
            f(a, b).square().sum().backward()
            torch.testing.assert_close((x.grad, w.grad), (a.grad, b.grad), rtol=1e-4, atol=1e-4)
    assert [c.role for c in found] == ["forward", "backward"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_training_over_rows_that_a_mask_selects(dynamic: bool) -> None:
    """Saved values, products and a norm of a size that is read from data: as exact as eager's."""
    torch.manual_seed(0)
    w = r(8, 8).requires_grad_()

    def f(x, w, mask):
        rows = F.layer_norm(F.gelu(x[mask] @ w), (8,))
        return (rows.t().contiguous().sin() * 2).sum(1)

    x, mask = r(40, 8).requires_grad_(), torch.rand(40) > 0.5
    exact_x, exact_w = (t.detach().double().requires_grad_() for t in (x, w))
    exact = torch.autograd.grad(f(exact_x, exact_w, mask).square().sum(), (exact_x, exact_w))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        errors = [
            [(a - b).abs().max() for a, b in zip(torch.autograd.grad(g(x, w, mask).square().sum(), (x, w)), exact)]
            for g in (f, torch.compile(f, backend="dicp_cpu", dynamic=dynamic, fullgraph=True))
        ]
    assert all(found <= 2 * eagers for eagers, found in zip(*errors))


def test_size_read_from_data() -> None:
    """An unbacked size: an extern call finds it, kernels use it."""

    def f(x, m):
        return x[m] * 2

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(f, backend="dicp_cpu", fullgraph=True)
        for keep in (3, 0, 8):
            x, m = r(8, 5), torch.arange(8) < keep
            close(compiled(x, m), f(x, m))


def test_memory_plan_with_symbols_names_them() -> None:
    f = torch.compile(lambda x: x.exp() @ x.t().sin(), backend="dicp_cpu", dynamic=True)
    with compiles() as found:
        f(r(6, 4))
    plan = found[0].program.plan
    assert plan.offset and not isinstance(plan.size, int)


def test_pieces_of_symbolic_size_are_views_as_in_eager() -> None:
    check(lambda x: x.chunk(2, 1)[1], r(1, 2), dynamic=True)  # one of several results of one operator


VIEWS_OF_ONE = {  # with symbolic sizes AOTAutograd makes views anew from where the compiled results lie
    "beside_a_sum_of_one_term": lambda x: (x.unsqueeze(2).sum(2), x[:, x.shape[1] // 2 :]),
    "of_a_clone": lambda x: x.clone().tensor_split(2, 1),
    "of_a_transposed_copy": lambda x: ((y := x.t().contiguous()), y[x.shape[1] // 2 :]),
    "of_a_broadcast_copy": lambda x: ((y := x.expand(3, -1, -1).clone())[1:], y[2, x.shape[0] // 2 :]),
    "of_a_conversion": lambda x: ((y := x.double())[1:], y[x.shape[0] // 2 :]),
    "beside_a_clone_of_all": lambda x: ((y := x * 2).clone(), y[1:], y[x.shape[0] // 2 :]),
    "of_a_product": lambda x: ((y := x @ x.t())[1:], y[x.shape[0] // 2 :]),
}


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", VIEWS_OF_ONE)
def test_views_of_one_tensor_keep_their_places_in_it(name: str, gradients: bool) -> None:
    check(VIEWS_OF_ONE[name], r(6, 5).requires_grad_(gradients), calls=1, dynamic=True)


def _first_filled(x):
    v = x.reshape(-1)
    v.transpose(0, -1)[:1].fill_(3)
    return v


WRITTEN = {
    "whole": lambda x: x.add_(1).view(-1),
    "part": lambda x: (x.add_(1), x[1:3])[1],
    "element": _first_filled,
    "two": lambda x: (x.mul_(2), x[2:], x.view(-1, 1))[1:],
}


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("offset, stride", [(0, 1), (3, 1), (1, 2)])
def test_views_of_a_written_input_lie_where_they_do_in_it(name: str, offset: int, stride: int) -> None:
    """An input somewhere inside its storage: AOTAutograd takes the offset from the compiled result."""
    fn = WRITTEN[name]
    compiled = torch.compile(fn, backend="dicp_cpu", dynamic=True)
    for n in (9, 17, 33):
        bases = [torch.arange(100.0) for _ in range(2)]
        expected, got = (
            f(b[offset : offset + n * stride : stride]) for f, b in zip((fn, compiled), bases, strict=True)
        )
        for b in bases:
            b.neg_()  # what shares memory shows it
        assert torch.equal(*bases)
        pairs = zip(expected, got, strict=True) if isinstance(expected, tuple) else [(expected, got)]
        for e, g in pairs:
            assert torch.equal(g, e) and g.stride() == e.stride()
            assert g.storage_offset() == e.storage_offset()


PARTS = {
    "split": lambda x: x.tensor_split(2, 2)[1].real,
    "negated": lambda x: x[:, x.shape[1] // 2 :].conj().imag,
    "bits": lambda x: torch.view_as_real(x)[:, x.shape[1] // 2 :].view(torch.int32),
    "written": lambda x: (x.mul_(2), x[:, x.shape[1] // 2 :].real)[1],
}


@pytest.mark.parametrize("name", PARTS)
def test_views_of_an_input_as_another_dtype_lie_where_they_do_in_it(name: str) -> None:
    """From where a symbolic size says: AOTAutograd takes the offset, and a mark, from the compiled result."""
    fn = PARTS[name]
    compiled = torch.compile(fn, backend="dicp_cpu", dynamic=True)
    base = torch.arange(19 * 5 * 18).reshape(19, 5, 18) * (1 - 2j)
    for cut in (base[1:18], base[:5, :3, :7].contiguous(), base[3:8, :3, :7]):
        again = torch.empty(0, dtype=cut.dtype).set_(
            cut.untyped_storage().clone(), cut.storage_offset(), cut.shape, cut.stride()
        )
        e, g = fn(cut), compiled(again)
        assert torch.equal(g, e) and g.dtype == e.dtype and g.is_neg() == e.is_neg()
        assert g.stride() == e.stride() and g.storage_offset() == e.storage_offset()
        assert g.untyped_storage().data_ptr() == again.untyped_storage().data_ptr()


def test_a_part_of_a_complex_number_has_its_shape() -> None:
    compiled = torch.compile(lambda x, y: x.expand(y.shape[0]).real[y.shape[0] - 2], backend="dicp_cpu", dynamic=True)
    assert torch.equal(compiled(torch.tensor(1 + 2j), torch.randn(5)), torch.tensor(1.0))


def test_memory_of_sizes_that_look_negative() -> None:
    """The backward's buffers have s * (t - 2) elements: a lower bound below zero, so a division rounded down."""

    def f(x):
        pad = torch.cat([x.narrow(1, 0, 1), x], 1)
        twice = torch.cat([pad, pad])
        return torch.stack([twice, twice]), x[:, 1:-1].sum(-1).mT.softmax(-1)

    compiled = torch.compile(f, backend="dicp_cpu", dynamic=True)
    grads = []
    for fn in (compiled, f):
        x = torch.linspace(-1, 1, 28).reshape(4, 7, 1).requires_grad_()
        sum((y * torch.linspace(-1, 2, y.numel()).view(y.shape)).sum() for y in fn(x)).backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


def written(x, k):
    x = x * 1.5
    x[k] = 7.0
    x[k:] *= 2
    return x


NUMBERS = {
    "element": lambda x, k: x[k] * 2,
    "from": lambda x, k: x[k:] * 2,
    "up_to": lambda x, k: x[:k] * 2,
    "two_parts": lambda x, k: torch.cat([x[k:], x[:k]]),
    "written": written,
    "put_into_copy": lambda x, k: torch.select_scatter(x[:, None] * x, x, 0, k),
    "remainder": lambda x, k: x * (k % 3),
    "quotient": lambda x, k: x * (k // 3),
    "turned": lambda x, k: x.roll(-k) + x.roll(k, 0),
    "padded": lambda x, k: F.pad(x, (-k, k + 9)) + 1,
    "diagonals": lambda x, k: (x[:, None] * x).tril(k) + torch.eye(8).triu(k - 1),
    "range": lambda x, k: torch.arange(k, k + 8) * k + x,
    "times_positions": lambda x, k: torch.arange(8) * k + (torch.arange(8) * k > k - 3) * x,
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_may_be_negative(name: str) -> None:
    """A number that varies is no size: it was taken for one, and read, wrote and divided so. Whichever sign it has
    while tracing, it has the other later."""
    fn = NUMBERS[name]
    for numbers in ((-3, -5, 2, -8), (2, 3, -4, 7)):
        torch._dynamo.reset()
        compiled = torch.compile(fn, backend="dicp_cpu", dynamic=True, fullgraph=True)
        for k in numbers:
            x = r(8)
            close(compiled(x.clone(), k), fn(x.clone(), k), f"{name} at {k}")


def test_the_second_number_makes_it_vary() -> None:
    compiled = torch.compile(lambda x, k: x[k] * 2, backend="dicp_cpu", fullgraph=True)
    x = r(8)
    assert [compiled(x, k).item() for k in (-1, -2, 3)] == [2 * x[k].item() for k in (-1, -2, 3)]


POSITIONS = {
    "element": lambda x, k: x[k.item()] * 2,
    "written": lambda x, k: torch.select_scatter(x * 1.5, torch.tensor(7.0), 0, k.item()) + 1,
    "all_behind_written": lambda x, k: written(x, k.item()),
    "arithmetic": lambda x, k: x * (k.item() % 3) + k.item() // 3 + torch.arange(8) * k.item(),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_positions_read_from_data_may_be_negative(name: str) -> None:
    fn = POSITIONS[name]
    if name == "all_behind_written" and torch.__version__ < "2.13":
        pytest.skip("torch 2.11 does not trace it, whatever the backend")
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(fn, backend="dicp_cpu", fullgraph=True)
        for k in (2, -2, -8, 0, 7):
            x = r(8)
            close(compiled(x.clone(), torch.tensor(k)), fn(x.clone(), torch.tensor(k)), f"{name} at {k}")
        for k in (8, -9) if name == "element" else ():
            with pytest.raises(IndexError):
                compiled(r(8), torch.tensor(k))


def test_a_rounded_number_made_of_sizes_is_the_hosts() -> None:
    compiled = torch.compile(lambda x: x * round(x.shape[0] * 0.3, 1), backend="dicp_cpu", dynamic=True)
    for n in (7, 9):
        x = r(n)
        close(compiled(x), x * round(n * 0.3, 1))


FROM_DATA = {
    "pieces": lambda x, k: [t * 2 for t in torch.tensor_split(x, torch.stack([k, k + 9, k - 3]), dim=1)],
    "views": lambda x, k: torch.tensor_split(x, torch.stack([k, k + 1]), dim=1),
    "to_the_end": lambda x, k: x[:, k.item() :] * 2,
    "summed": lambda x, k: x.cumsum(1)[:, k.item() : 3].exp().sum(1),
    "another_rank": lambda x, k: torch.unique_consecutive(x, return_counts=True, dim=-1),
}


@pytest.mark.parametrize("name", FROM_DATA)
def test_slices_between_positions_read_from_data(name: str) -> None:
    """Where one begins was taken unclamped, and sums over one had no elements."""
    x, fn = torch.arange(8.0).reshape(2, 4), FROM_DATA[name]
    settings = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with torch._dynamo.config.patch(**settings):
        f = torch.compile(fn, backend="dicp_cpu")
        for k in (1, 2, -2):
            expected, got = fn(x, torch.tensor(k)), f(x, torch.tensor(k))
            assert isinstance(expected, torch.Tensor) or len(expected) == len(got)
            torch.testing.assert_close(got, expected)

FACTORS = {
    "addmm": (lambda b, x, w: torch.addmm(b, x, w, alpha=1 / x.shape[1]), (3, 5), (3, 8), (8, 5)),
    "baddbmm": (
        lambda b, x, w: torch.baddbmm(b, x, w, alpha=x.shape[1] ** -0.5, beta=x.shape[2] / 2),
        (2, 3, 5),
        (2, 3, 8),
        (2, 8, 5),
    ),
    "histogram": (lambda x: torch.histc(x, 5, 0, 1 / x.shape[0]), (7,)),
    "norm": (lambda x: x.norm(p=1 + x.shape[0] / 3), (7, 3)),
}


@pytest.mark.parametrize("name", FACTORS)
def test_numbers_made_of_sizes(name: str) -> None:
    """Given to calls of libraries, which have no code for them."""
    fn, *shapes = FACTORS[name]
    tensors = [torch.randn(s, requires_grad=name != "histogram") for s in shapes]
    check(fn, *tensors, dynamic=True)


def second_row(x):
    return x.as_strided((x.shape[0],), (1,), x.shape[1])


def columns_and_sum(x):
    return x.as_strided((x.shape[0],), (x.shape[1],), 1), x.sum()


def written_second_row(x):
    x.add_(1)
    return x.as_strided((x.shape[0],), (1,), x.shape[1])


@pytest.mark.parametrize("fn", [second_row, columns_and_sum, written_second_row])
def test_windows_on_an_input_lie_where_they_should(fn):
    """AOTAutograd makes them again from the place of what the program returns."""
    compiled = torch.compile(fn, backend="dicp_cpu", dynamic=True, fullgraph=True)
    for rows, columns in ((3, 4), (2, 5)):
        mine, theirs = (torch.arange(1.0 * rows * columns).view(rows, columns) for _ in range(2))
        got, want = compiled(mine), fn(theirs)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        window = got[0] if isinstance(got, tuple) else got
        window.fill_(7)
        (want[0] if isinstance(want, tuple) else want).fill_(7)
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_a_gather_by_no_positions_of_another_rank():
    compiled = torch.compile(lambda x, i: x.gather(0, i) * 2, backend="dicp_cpu", dynamic=True)
    assert compiled(torch.randn(3), torch.zeros(0, 2, dtype=torch.long)).shape == (0, 2)

"""Mutated inputs, views of inputs, aliased outputs: all as eager does."""

from __future__ import annotations

import pytest
import torch
from checks import check, compiles


def r(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def c(*shape: int) -> torch.Tensor:
    """Of a dtype that kernels do not store."""
    return torch.randn(shape, dtype=torch.complex64)


def add_one(x):
    x.add_(1)
    return x * 2


def overwrite(x, y):
    x.copy_(y.sin())


def swap(x, y):
    t = x.clone()
    x.copy_(y)
    y.copy_(t)


def use_old_and_new(x):
    old = x * 2
    x.mul_(3)
    return old + x


def normalise_in_place(x):
    x.sub_(x.mean(1, keepdim=True))
    return x.sum(1)


def read_after_reduction(x):
    mean = x.mean(1, keepdim=True)
    x.add_(1)
    return mean, x - mean


def centred_old_value(x):
    """The old x is read in the pass after the mean, while the new one is written."""
    y = x - x.mean(1, keepdim=True)
    x.add_(1)
    return y


def softmax_into(x, y):
    y.copy_(x.softmax(1))
    x.zero_()


def shift_in_place(x):
    x[1:] = x[:-1].clone() * 2
    return x.sum()


def transpose_in_place(x):
    x.copy_(x.t().clone())


def reverse_rows_in_place(x):
    x.copy_(x.flip(0))
    return x + 0


def cache_update(cache, k, at):
    cache.index_copy_(1, at, k)
    return (cache * 2).sum(1)


def cache_slot(cache, k):
    cache[:, 2:4] = k
    return cache.sum()


def scatter_in_place(x, i, y):
    x.index_add_(0, i, y)
    return x.relu()


def scatter_reads_old(x, i, y):
    old = x.sum(0)
    x.index_add_(0, i, y)
    return old


def put_in_place(x, i, y):
    x[i] = y
    return x * 1.5


def two_updates(x, i, y):
    x.index_add_(0, i, y)
    x.index_add_(0, i, y * 2)


def through_view(x):
    x.view(-1)[3:9].mul_(2)
    return x.sum(0)


def through_transpose(x):
    x.t().add_(torch.arange(x.shape[0]))


def resizing_free(x):
    y = x[:, 1]
    y.fill_(5)
    x[0].add_(y.sum())
    return y * 2


def overwrite_with_old(x, y):
    old = x * 1
    x.copy_(y)
    y.copy_(old)
    return old


def overwrite_then_change(x, y):
    y.copy_(x)
    x.mul_(2)
    return y + 1


def counters(x, n):
    n += 1
    return x * n


MUTATIONS = {
    "add_one": (add_one, r(5, 7)),
    "overwrite": (overwrite, r(5, 7), r(5, 7)),
    "overwrite_by_numbers": (lambda x: (x.copy_(5), x[0].copy_(True), x.t()[2:].copy_(-0.5)), r(5, 7)),
    "overwrite_broadcast": (overwrite, r(5, 7), r(7)),
    "overwrite_other_dtype": (overwrite, r(5, 7).double(), r(5, 7)),
    "swap": (swap, r(40), r(40)),
    "use_old_and_new": (use_old_and_new, r(5, 7)),
    "normalise_in_place": (normalise_in_place, r(5, 70)),
    "read_after_reduction": (read_after_reduction, r(5, 70)),
    "centred_old_value": (centred_old_value, r(5, 70)),
    "softmax_into": (softmax_into, r(5, 70), r(5, 70)),
    "shift_in_place": (shift_in_place, r(40)),
    "transpose_in_place": (transpose_in_place, r(33, 33)),
    "reverse_rows_in_place": (reverse_rows_in_place, r(9, 33)),
    "cache_update": (cache_update, r(2, 9, 20), r(2, 3, 20), torch.tensor([4, 1, 7])),
    "cache_slot": (cache_slot, r(2, 9, 20), r(2, 2, 20)),
    "scatter_in_place": (scatter_in_place, r(9, 20), torch.tensor([3, 3, 0]), r(3, 20)),
    "means_in_place": (
        lambda x, i, y: x.index_reduce_(0, i, y, "mean"),
        r(9, 20),
        torch.tensor([3, 3, 0]),
        r(3, 20),
    ),
    "scatter_reads_old": (scatter_reads_old, r(9, 20), torch.tensor([3, 3, 0]), r(3, 20)),
    "put_in_place": (put_in_place, r(9, 20), torch.tensor([3, 8, 0]), r(3, 20)),
    "two_updates": (two_updates, r(9, 20), torch.tensor([3, 3, 0]), r(3, 20)),
    "through_view": (through_view, r(5, 7)),
    "through_transpose": (through_transpose, r(5, 7)),
    "view_of_view": (resizing_free, r(5, 7)),
    "counters": (counters, r(5), torch.tensor(3)),
    "strided_argument": (add_one, r(5, 14)[:, ::2]),
    "transposed_argument": (add_one, r(5, 7).t()),
    "bf16": (use_old_and_new, r(5, 70).bfloat16()),
    "bool": (lambda m: m.logical_not_(), torch.tensor([True, False, True])),
    "complex": (lambda x: x.zero_() + 1, c(4, 5)),
    "complex_swapped": (swap, c(40), c(40)),
    "complex_after_use": (overwrite_with_old, c(4, 5), c(4, 5)),
    "complex_from_real": (overwrite_then_change, r(4, 5), c(4, 5)),
    "complex_from_mutated": (overwrite_then_change, c(4, 5), c(4, 5)),
    "complex_view": (lambda x, y: x[1:].copy_(y), c(4, 5), c(5)),
    "real_from_complex": (lambda x, y: y.copy_(x.mul_(2).real), c(4, 5), r(4, 5)),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutated_inputs_are_as_eager_leaves_them(name: str) -> None:
    fn, *args = MUTATIONS[name]
    check(fn, *args)


def test_two_arguments_on_the_same_memory() -> None:
    base = r(10, 8)

    def f(x, y):
        x.add_(1)
        return y * 2

    check(f, base[:6], base[3:])
    check(f, base, base)


def test_argument_that_overlaps_itself_is_read() -> None:
    check(lambda x, y: x * y + x.sum(0), r(7).expand(5, 7), r(5, 1).expand(5, 7))
    check(lambda x: x * 2, torch.arange(20.0).as_strided((6, 8), (2, 1)))


RESULTS = {
    "input_itself": (lambda x: x, r(4, 5)),
    "input_and_more": (lambda x, y: (y, x + y, x), r(4, 5), r(4, 5)),
    "view_of_input": (lambda x: (x[1:], x.t(), x * 2), r(4, 5)),
    "same_result_twice": (lambda x: (x + 1,) * 2, r(4, 5)),
    "result_and_its_view": (lambda x: ((y := x.exp()), y[0], y.t()), r(4, 5)),
    "view_only": (lambda x: x.view(2, 2, 5), r(4, 5)),
    "view_of_temporary": (lambda x: (x + 1)[1:, ::2], r(4, 5)),
    "transposed_temporary": (lambda x: (x + 1).t(), r(4, 5)),
    "expanded": (lambda x: (x + 1).expand(3, 4, 5), r(4, 5)),
    "mutated_and_returned": (lambda x: x.mul_(2), r(4, 5)),
    "mutated_view_returned": (lambda x: x.mul_(2)[1:], r(4, 5)),
    "detached": (lambda x: (x.detach(), x + 1), r(4, 5)),
    "nothing_computed": (lambda x: (x, None, 3, "text"), r(4, 5)),
    "nested": (lambda x: {"a": [x + 1, (x * 2,)], "b": x}, r(4, 5)),
    "constant": (lambda x: (torch.ones(3), x), r(4, 5)),
    "captured_tensor": (lambda x, c=torch.arange(5.0): (x + c, c), r(4, 5)),
    "library_result_view": (lambda x: ((x @ x.t())[1:], x), r(4, 5)),
    "real_view_of_complex": (lambda x: torch.view_as_real(torch.polar(x, x)), r(4, 5)),
    "piece_of_flat_input": (lambda x: (x.flatten()[1:3], x.view(-1)[3:][::2]), r(3, 5, 7)),
    "mutated_flat_piece": (lambda x: x.mul_(2).flatten()[1:3], r(3, 5, 7)),
    "piece_of_flat_complex": (lambda x: (x.flatten()[2:5], x * 2), c(3, 5, 7)),
    "pieces_of_complex_results": (
        lambda x: ((y := x * 2), y.flatten()[2:5], x.mul_(3).flatten()[1:3]),
        c(3, 5, 7),
    ),
    "conjugated_result": (lambda x: (x * 2).conj(), c(4, 5)),
    "conjugate_and_result": (lambda x: ((y := x * 2), y.conj(), y.mH, y.conj()[1:]), c(4, 5)),
    "piece_of_conjugate": (lambda x: (x * 2).conj().flatten()[1:3], c(3, 5, 7)),
    "piece_of_conjugated_input": (lambda x: (x.conj().flatten()[1:3], x.mT.conj()), c(3, 5, 7)),
    "conjugated_then_written": (lambda x: (x.conj().mul_(2j), x.mH), c(4, 5)),
    "transform_that_conjugates": (lambda x: torch.fft.ihfft(x), r(4, 6)),
    "piece_of_negated_input": (lambda x: torch._neg_view(x).flatten()[1:3], r(3, 5, 7)),
    "result_and_flat_piece": (
        lambda x: ((y := x * 2), y.flatten()[1:3], y.view(-1)[3:7].view(2, 2)),
        r(3, 5, 7),
    ),
    "result_and_its_bits": (lambda x: ((y := x * 2).view(torch.int32)[1:], y), r(4, 5)),
    "result_and_its_parts": (lambda x: ((y := x * 2), torch.view_as_real(y), y.real[:, 2:], y.imag), c(4, 6)),
    "parts_as_complex": (lambda x: ((y := torch.view_as_complex(x * 2))[:, 2:], y), r(4, 6, 2)),
    "complex_written_by_parts": (
        lambda x: ((y := x * 2).tensor_split(2, 1)[1], torch.view_as_real(y).sub_(1), y),
        c(4, 6),
    ),
    # the result lies as the input does, which is not dense
    "result_with_gaps_and_its_view": (
        lambda x: ((y := x[..., ::2].diagonal_scatter(x[..., ::2].diagonal())), y.flatten(0, 1)),
        r(5, 4, 6),
    ),
    "views_of_result_with_gaps": (
        lambda x: ((y := x[..., ::2].diagonal_scatter(x[..., ::2].diagonal())).flatten(0, 1), y.mT),
        r(5, 4, 6),
    ),
    # strides that are the larger of one and a number that may be zero
    "result_of_sizes_given_and_its_transpose": (
        lambda x, n, m: ((y := x.as_strided((n, m), (1, 1)) + 1).mT, y),
        r(31, 3), 2, 2,
    ),
}


FRESH = {
    "clone": lambda x: x.clone(),
    "times_one": lambda x: x * 1,
    "cat_of_one": lambda x: torch.cat([x]),
    "roll_by_zero": lambda x: x.roll(0, 1),
    "copy": lambda x: x.to(torch.float32, copy=True),
    "first_power": lambda x: x.pow(1),
    "pad_by_zero": lambda x: torch.nn.functional.pad(x, (0, 0)),
    "repeat_once": lambda x: x.repeat(1, 1),
    "sum_of_one": lambda x: x[None].sum(0),
    "cumsum_of_one": lambda x: x[None].cumsum(0)[0],
    "sum_of_no_dims": lambda x: x[0, 0].sum(),
    "flip_of_one": lambda x: x[None].flip(0)[0],
    "gather_of_all": lambda x: x.gather(1, torch.arange(5).expand(4, 5)),
    "slice_clone": lambda x: x[1:].clone(),
    "transposed_clone": lambda x: x.t().clone(),
    "result_and_clone": lambda x: ((y := x.exp()), y.clone()),
    "result_and_part_of_it": lambda x: ((y := x.exp()), y[1:].clone()),
    "result_times_one": lambda x: ((y := x.exp()), y * 1),
    "library_result_and_clone": lambda x: ((y := x @ x.t()), y.clone()),
    "two_clones": lambda x: (x.exp().clone(), x.exp().clone()),
    "constants": lambda x: (torch.ones(3), torch.ones(3)),
    "shuffle_of_one_group": lambda x: torch.nn.functional.channel_shuffle(x[None], 1),
}


@pytest.mark.parametrize("name", FRESH)
def test_fresh_results_share_no_memory(name: str) -> None:
    """What eager allocates anew is the caller's to write on, even where the elements are those of an input."""
    check(FRESH[name], r(4, 5), calls=1)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", RESULTS)
def test_results_alias_as_eagers_do(name: str, dynamic: bool) -> None:
    fn, *args = RESULTS[name]
    check(fn, *args, dynamic=dynamic)


@pytest.mark.parametrize(
    "name",
    """piece_of_flat_input piece_of_flat_complex result_and_flat_piece view_of_temporary conjugated_result
    piece_of_conjugate piece_of_conjugated_input piece_of_negated_input parts_as_complex""".split(),
)
def test_results_with_gradients_alias_as_eagers_do(name: str) -> None:
    """AOTAutograd makes those views again, of the result that they are views of."""
    fn, x = RESULTS[name]
    check(fn, x.clone().requires_grad_(), dynamic=True)


def test_a_result_seen_as_complex_lies_where_gradients_know_it() -> None:
    """AOTAutograd makes the piece again from the result, at the place where ours lies."""

    def f(x):
        y = torch.triu(x, 1)
        piece = y.tensor_split(2, 1)[1]
        torch.view_as_real(y).sub_(1)
        return piece, y

    compiled = torch.compile(f, backend="dicp_cpu", dynamic=True)
    for rows, columns in ((2, 3), (6, 8)):
        x = c(rows, columns).requires_grad_()
        for got, wanted in zip(compiled(x), f(x), strict=True):
            torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("mark", [torch.conj, torch._neg_view])
def test_pieces_of_marked_results_are_made_again_with_the_mark(mark) -> None:
    """AOTAutograd makes results anew that view one tensor, from what is returned for them."""

    def f(x):
        y = mark(x * 2).flatten()
        return y, y.view(-1), x

    check(f, c(4, 5).requires_grad_(), dynamic=True)


def test_a_conjugate_is_a_bit() -> None:
    """No copy is made of what is returned conjugated."""
    with compiles() as found:
        got = torch.compile(lambda x: (x * 2).conj(), backend="dicp_cpu")(c(4, 5))
    assert got.is_conj()
    assert found[0].program.library_calls == []


def test_a_copy_of_a_conjugate_is_none() -> None:
    """What a forward keeps for its backward is what the backward was traced with."""
    got = torch.compile(lambda x: (x * 2).conj().clone(), backend="dicp_cpu")(x := c(4, 5))
    assert not got.is_conj()
    torch.testing.assert_close(got, (x * 2).conj())
    a, b = (torch.eye(4).add(0.1).cumsum(0).requires_grad_() for _ in range(2))
    torch.compile(torch.linalg.eigvals, backend="dicp_cpu")(a).abs().sum().backward()
    torch.linalg.eigvals(b).abs().sum().backward()
    torch.testing.assert_close(a.grad, b.grad)


def test_strides_that_were_asked_for() -> None:
    f = torch.compile(lambda: torch.empty_strided((5, 5), (1, 0), dtype=torch.complex64), backend="dicp_cpu")
    assert f().stride() == (1, 0)


def test_a_slice_that_data_decides_is_returned() -> None:
    def f(x, at):
        return torch.narrow(x, 1, at, 2)

    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        for x in (r(5, 5), c(5, 5)):
            got = torch.compile(f, backend="dicp_cpu", fullgraph=True)(x, torch.tensor(2))
            torch.testing.assert_close(got, x[:, 2:4])


def test_an_extern_may_give_a_conjugate() -> None:
    @torch.library.custom_op("dicp_test::conjugate", mutates_args=())
    def conjugate(x: torch.Tensor) -> torch.Tensor:
        return x.clone().conj()

    conjugate.register_fake(lambda x: torch.empty_like(x).conj())
    x = c(4, 5)
    got = torch.compile(lambda x: conjugate(x) @ x.mT, backend="dicp_cpu")(x)
    torch.testing.assert_close(got, x.conj() @ x.mT)


MARKED = {
    "product": lambda x: x * 2,
    "matrix_product": lambda x: x @ x.mT,
    "sum": lambda x: x.sum(),
    "clone": lambda x: x.clone(),
    "real_part": lambda x: x.real + 1,
    "view": lambda x: x[1:],
    "itself": lambda x: (x, x + 1),
    "conjugate_of_it": lambda x: (x.conj(), x.conj() * 2, x.mH[1:]),
    "written": lambda x: x.mul_(2),
    "written_view": lambda x: (x[1:].add_(1), x.sum()),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", ["conjugate", "transposed", "expanded", "negative", "empty"])
@pytest.mark.parametrize("name", MARKED)
def test_inputs_that_are_conjugated_or_negated(name: str, kind: str, dynamic: bool) -> None:
    """The memory of such a tensor holds something else than its elements, and stays the caller's."""
    if kind == "expanded" and name.startswith("written"):
        pytest.skip("eager refuses to write to elements that share a place")
    make = {
        "conjugate": lambda: c(4, 5).conj(),
        "transposed": lambda: c(6, 5, 4)[::2].mH,
        "expanded": lambda: c(5).conj().expand(4, 5),
        "negative": lambda: c(4, 5).conj().imag,
        "empty": lambda: c(4, 0).conj(),
    }[kind]
    torch.manual_seed(0)
    x = make()
    torch.manual_seed(0)
    y = make()
    assert x.is_conj() or x.is_neg()
    got, want = torch.compile(MARKED[name], backend="dicp_cpu", dynamic=dynamic)(x), MARKED[name](y)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(x, y)
    assert (x.is_conj(), x.is_neg()) == (y.is_conj(), y.is_neg())


def test_gradients_given_as_conjugates() -> None:
    """Nothing that was traced tells of them: autograd hands over what it has."""
    x, y = (c(3, 4).requires_grad_() for _ in range(2))
    z, w = (c(4, 3).requires_grad_() for _ in range(2))
    y.data.copy_(x.data)
    w.data.copy_(z.data)
    f = torch.compile(lambda x, z: (x @ z, x.real * 2), backend="dicp_cpu")
    up, real = c(3, 3), c(3, 4)
    for out, *leaves in ((f(x, z), x, z), ((y @ w, y.real * 2), y, w)):
        torch.autograd.backward(out, [up.mH, real.conj().imag])
        assert all(t.grad is not None for t in leaves)
    torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(z.grad, w.grad)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: (x.real.diagonal().chunk(2, -1)[1], x.imag[1:]),
        lambda x: (x.conj().imag[1:], x.mH[1:]),
        lambda x: (torch.view_as_real(x)[1:].view(torch.int32)[:, 1:],),
    ],
)
def test_pieces_of_inputs_as_other_dtypes(f) -> None:
    """With symbolic sizes AOTAutograd makes the view again, from what the result says that it views."""
    x = c(5, 5)
    got, wanted = torch.compile(f, backend="dicp_cpu", dynamic=True)(x), f(x)
    for g, w in zip(got, wanted, strict=True):
        assert torch.equal(g, w) and g.dtype == w.dtype and g.data_ptr() == w.data_ptr()


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.sum(0, keepdim=True),
        lambda x: (x * 2).t(),
        lambda x: torch.stack([x, x + 1])[1],
        lambda x: (x @ x.t())[1:],
    ],
)
def test_results_may_be_written_to_where_they_have_gradients(f) -> None:
    """Autograd forbids writes through views that a custom function returns; these are none in eager."""
    start, grads = r(4, 4), []
    for call in (torch.compile(f, backend="dicp_cpu"), f):
        x = start.clone().requires_grad_()
        y = call(x)
        y[0].add_(1)
        y.mul_(2)
        y.sum().backward()
        grads.append((y.detach(), x.grad))
    torch.testing.assert_close(*grads)


def test_what_a_library_returned_may_be_written_to() -> None:
    """ATen's attention answers with a view of what only it knows."""
    q, k, v = (r(2, 4, 24, 16).requires_grad_() for _ in range(3))
    attention = torch.nn.functional.scaled_dot_product_attention
    results = []
    for call in (torch.compile(attention, backend="dicp_cpu"), attention):
        y = call(q, k, v)
        y[0].add_(1)
        results.append(y.detach())
    torch.testing.assert_close(*results)


def test_gradients_of_conjugated_inputs() -> None:
    """A forward keeps conjugates of what was traced as conjugates."""
    up = c(6, 10)
    grads = []
    torch.manual_seed(0)
    a, b = c(3, 2), c(2, 5)
    for f in (torch.compile(torch.kron, backend="dicp_cpu"), torch.kron):
        x, y = a.conj().requires_grad_(), b.conj().requires_grad_()
        f(x, y).backward(up)
        grads.append((x.grad, y.grad))
    torch.testing.assert_close(*grads)


def test_gradients_that_lie_nowhere() -> None:
    x = r(3).requires_grad_()
    torch.compile(lambda x: x.sin() * 2, backend="dicp_cpu")(x).backward(torch._efficientzerotensor((3,)))
    assert torch.equal(x.grad, torch.zeros(3))


def test_results_of_one_call_survive_the_next() -> None:
    """Results never lie in memory that another call uses again."""
    f = torch.compile(lambda x: ((x + 1).softmax(1), (x @ x.t()).relu(), x.sum(0)), backend="dicp_cpu")
    a, b = r(8, 8), r(8, 8)
    first = f(a)
    kept = [t.clone() for t in first]
    f(b)
    f(b)
    for t, k in zip(first, kept, strict=True):
        assert torch.equal(t, k)


def test_mutation_under_autograd() -> None:
    def f(x, buffer):
        buffer.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return (x - buffer).square()

    x = r(6, 5).requires_grad_()
    check(f, x, r(5))


def test_scatter_into_a_mutated_input_copies_nothing() -> None:
    """A static KV cache is updated in place: no kernel touches all of it."""

    def f(cache, k, at):
        cache.index_copy_(2, at, k)

    with compiles() as found:
        check(f, r(1, 4, 64, 16), r(1, 4, 1, 16), torch.tensor([5]), calls=1)
    (launch,) = found[0].program.launches
    sizes = 1
    for axis in launch.kernel.axes:
        sizes *= axis.size
    assert sizes == 4 * 16


def test_large_memory_that_ends_in_part_of_a_line_is_cleared() -> None:
    """The last part of 64 KB, shorter than the way to a whole register: what lay behind was cleared, and more."""
    whole = torch.ones(2097154 + 64)
    x = whole[1:2097154]
    torch.compile(lambda x: x.zero_(), backend="dicp_cpu")(x)
    assert whole[0] == 1 and not x.any() and whole[2097154:].eq(1).all()

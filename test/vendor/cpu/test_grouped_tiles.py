"""Products of groups and their gradients: against float64, over groups of any size, none and all rows among them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dicp.compiler import Compiled, observe
from dicp.vendor.cpu_graph.claims import grouped
from dicp.vendor.cpu_graph.microkernels import available

pytest.importorskip("transformers.integrations.moe")
pytestmark = pytest.mark.skipif(not available(torch.float32), reason="no micro-kernels for this processor")
CUTS = {"some": [3, 3, 20, 41], "none at first": [0, 0, 41, 41], "rows behind": [5, 9, 9, 30]}
WAYS = ("tiles", "pairs", "mm")


@pytest.fixture(autouse=True)
def _anew() -> None:
    torch._dynamo.reset()


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The end of the claim's name, on whatever processor the test runs; pairs are of bf16, and of those that have
    products of it."""
    monkeypatch.setattr(grouped, "_tiles_ahead", lambda dtype: request.param == "tiles")
    bf16 = torch.bfloat16 in request.node.callspec.params.values() or "aten" in request.node.name
    if request.param == "pairs" and not (bf16 and available(torch.bfloat16)):
        pytest.skip("no products of pairs")
    if request.param == "mm":
        monkeypatch.setattr(grouped, "available", lambda dtype: dtype == torch.float32)
    return "tiles of pairs, or mm" if request.param == "pairs" else request.param


def grouped_mm(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return torch.ops.transformers.grouped_mm_fallback(x, w, offsets)  # aten's is traced in bf16 alone


def groups(offsets: list[int]) -> list[slice]:
    return [slice(start, end) for start, end in zip([0, *offsets], offsets)]


def exact(x: torch.Tensor, w: torch.Tensor, offsets: list[int]) -> torch.Tensor:
    out = torch.zeros(x.shape[0], w.shape[2], dtype=torch.float64)
    for e, of in enumerate(groups(offsets)):
        out[of] = x[of].double() @ w[e].double()
    return out


def exact_gradient(x: torch.Tensor, grad: torch.Tensor, offsets: list[int]) -> torch.Tensor:
    """Of the matrices."""
    return torch.stack([x[of].double().T @ grad[of].double() for of in groups(offsets)])


def close(
    found: torch.Tensor, of: Callable[..., torch.Tensor], a: torch.Tensor, b: torch.Tensor, offsets: list[int]
) -> bool:
    """To what summing in float32 and rounding once may cost."""
    wanted, sizes = of(a, b, offsets), of(a.abs(), b.abs(), offsets)
    allowed = 2 * torch.finfo(torch.float32).eps * sizes + torch.finfo(found.dtype).eps * wanted.abs()
    return bool(((found.double() - wanted).abs() <= allowed).all())


def operands(dtype: torch.dtype, by_columns: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, matrices, and the gradient of their product."""
    torch.manual_seed(0)
    x, w, grad = torch.randn(41, 48), torch.randn(4, 48, 72) / 7, torch.randn(41, 72)
    w = w.mT.contiguous().mT if by_columns else w
    return x.to(dtype), w.to(dtype), grad.to(dtype)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cuts", CUTS)
def test_groups(cuts: str, dtype: torch.dtype, by_columns: bool, dynamic: bool, way: str) -> None:
    x, w, _ = operands(dtype, by_columns)
    seen: list[Compiled] = []
    with observe(seen.append), torch.no_grad():
        compiled = torch.compile(grouped_mm, backend="dicp_cpu", dynamic=dynamic, fullgraph=True)
        found = compiled(x, w, torch.tensor(CUTS[cuts], dtype=torch.int32))
    assert [c.claim.name for c in seen[0].program.library_calls] == [f"grouped_mm: {way}"]
    assert close(found, exact, x, w, CUTS[cuts])
    assert not found[CUTS[cuts][-1] :].any()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cuts", CUTS)
def test_gradients(cuts: str, dtype: torch.dtype, by_columns: bool, dynamic: bool, way: str) -> None:
    """That of the matrices lies as they do; that of a matrix of no rows is 0."""
    x, w, grad = operands(dtype, by_columns)
    x.requires_grad_(), w.requires_grad_()
    seen: list[Compiled] = []
    with observe(seen.append):
        compiled = torch.compile(grouped_mm, backend="dicp_cpu", dynamic=dynamic, fullgraph=True)
        of_x, of_w = torch.autograd.grad(compiled(x, w, torch.tensor(CUTS[cuts])), (x, w), grad)
    (call,) = seen[1].program.library_calls
    assert call.claim.name == f"grouped_mm backward: {way}" and not seen[1].program.externs
    assert close(of_x, exact, grad, w.mT, CUTS[cuts])
    assert close(of_w, exact_gradient, x, grad, CUTS[cuts])
    assert of_w.stride() == w.stride()


@pytest.mark.parametrize("by_columns", [False, True])
def test_gradients_of_atens_product(by_columns: bool, way: str) -> None:
    """What nn.functional has of it, in the dtype that it is traced in."""
    x, w, grad = operands(torch.bfloat16, by_columns)
    x.requires_grad_(), w.requires_grad_()
    offsets = CUTS["none at first"]
    seen: list[Compiled] = []

    def model(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.grouped_mm(x, w, offs=offsets)

    with observe(seen.append):
        found = torch.compile(model, backend="dicp_cpu")(x, w, torch.tensor(offsets, dtype=torch.int32))
        of_x, of_w = torch.autograd.grad(found, (x, w), grad)
    calls = [c.claim.name for s in seen for c in s.program.library_calls]
    assert calls == [f"grouped_mm: {way}"] * 3
    assert close(found, exact, x, w, offsets) and close(of_x, exact, grad, w.mT, offsets)
    assert close(of_w, exact_gradient, x, grad, offsets)


def test_atens_product_without_groups_is_another_call() -> None:
    """Of batches."""
    x, w = torch.randn(4, 8, 16).bfloat16(), torch.randn(4, 16, 24).bfloat16()
    seen: list[Compiled] = []
    with observe(seen.append):
        found = torch.compile(lambda x, w: torch._grouped_mm(x, w), backend="dicp_cpu")(x, w)
    assert [c.claim.name for c in seen[0].program.library_calls] == ["_grouped_mm: ATen"]
    torch.testing.assert_close(found, x @ w, rtol=1e-2, atol=1e-2)


def test_one_gradient_of_two(way: str) -> None:
    x, w, grad = operands(torch.float32, False)
    w.requires_grad_()
    compiled = torch.compile(grouped_mm, backend="dicp_cpu", fullgraph=True)
    (of_w,) = torch.autograd.grad(compiled(x, w, torch.tensor(CUTS["some"])), (w,), grad)
    assert close(of_w, exact_gradient, x, grad, CUTS["some"])


@pytest.mark.parametrize("behind", [0, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operands_that_lie_otherwise(dtype: torch.dtype, behind: int, way: str) -> None:
    """Rows of x apart, or by columns; a gradient that is one row over and over."""
    x, w, _ = operands(dtype, True)
    apart = x.new_zeros(41, 48 + behind)[:, :48].copy_(x) if behind else x.T.contiguous().T
    grad = x.new_empty(72).normal_().expand(41, 72)
    leaf, w = apart.detach().requires_grad_(), w.requires_grad_()
    compiled = torch.compile(grouped_mm, backend="dicp_cpu", fullgraph=True)
    found = compiled(leaf, w, torch.tensor(CUTS["some"]))
    of_x, of_w = torch.autograd.grad(found, (leaf, w), grad)
    assert close(found, exact, x, w, CUTS["some"])
    assert close(of_x, exact, grad, w.mT, CUTS["some"])
    assert close(of_w, exact_gradient, x, grad, CUTS["some"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_a_pair_is_left(dtype: torch.dtype, way: str) -> None:
    x, w = torch.randn(41, 47, dtype=dtype), (torch.randn(4, 72, 47) / 7).to(dtype).mT
    compiled = torch.compile(grouped_mm, backend="dicp_cpu", fullgraph=True)
    found = compiled(x, w, torch.tensor(CUTS["some"], dtype=torch.int32))
    assert close(found, exact, x, w, CUTS["some"])


def test_groups_of_few_rows_have_the_workspace_that_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "_tiles_ahead", lambda dtype: True)
    seen: list[Compiled] = []
    with observe(seen.append), torch.no_grad():
        ends, w = torch.tensor([30, 40], dtype=torch.int32), torch.randn(2, 300, 6000).mT
        torch.compile(grouped_mm, backend="dicp_cpu")(torch.randn(40, 6000), w, ends)
    (call,) = seen[0].program.library_calls
    assert call.outputs[-1].shape[0] >= 4 * 48 * 6000

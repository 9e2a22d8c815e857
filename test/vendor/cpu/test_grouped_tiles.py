"""Products of groups of rows by tiles: against float64, over groups of any size, none and all rows among them."""

from __future__ import annotations

import pytest
import torch

from dicp.compiler import Compiled, observe
from dicp.vendor.cpu_graph.claims import grouped
from dicp.vendor.cpu_graph.microkernels import available

pytest.importorskip("transformers.integrations.moe")
pytestmark = pytest.mark.skipif(not available(torch.float32), reason="no micro-kernels for this processor")
CUTS = {"some": [3, 3, 20, 41], "none at first": [0, 0, 41, 41], "rows behind": [5, 9, 9, 30]}


@pytest.fixture(autouse=True)
def _ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """On whatever processor the test runs, each compiled anew."""
    torch._dynamo.reset()
    monkeypatch.setattr(grouped, "_is_ahead", lambda dtype: True)


def grouped_mm(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return torch.ops.transformers.grouped_mm_fallback(x, w, offsets)  # aten's is traced in bf16 alone


def exact(x: torch.Tensor, w: torch.Tensor, offsets: list[int]) -> torch.Tensor:
    out = torch.zeros(x.shape[0], w.shape[2], dtype=torch.float64)
    for e, (start, end) in enumerate(zip([0, *offsets], offsets)):
        out[start:end] = x[start:end].double() @ w[e].double()
    return out


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cuts", CUTS)
def test_groups(cuts: str, dtype: torch.dtype, by_columns: bool, dynamic: bool) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(41, 48).to(dtype), (torch.randn(4, 48, 72) / 7).to(dtype)
    w = w.mT.contiguous().mT if by_columns else w
    seen: list[Compiled] = []
    with observe(seen.append), torch.no_grad():
        compiled = torch.compile(grouped_mm, backend="dicp_cpu", dynamic=dynamic, fullgraph=True)
        found = compiled(x, w, torch.tensor(CUTS[cuts], dtype=torch.int32))
    assert [c.claim.name for c in seen[0].program.library_calls] == ["grouped_mm: tiles"]
    wanted = exact(x, w, CUTS[cuts])
    eps = torch.finfo(dtype).eps
    assert (found.double() - wanted).abs().max() <= 2 * eps * wanted.abs().max()
    assert not found[CUTS[cuts][-1] :].any()


def test_atens_product_of_groups() -> None:
    x, w, offsets = torch.randn(41, 48).bfloat16(), torch.randn(4, 48, 72).bfloat16(), CUTS["none at first"]
    found = torch.compile(lambda x, w, o: torch._grouped_mm(x, w, offs=o), backend="dicp_cpu")(
        x, w, torch.tensor(offsets, dtype=torch.int32)
    )
    torch.testing.assert_close(found.double(), exact(x, w, offsets), rtol=1e-2, atol=1e-2)


def test_experts_of_transformers_are_no_call_into_python() -> None:
    """Rows by 64-bit offsets; its gradients stay the library's own."""
    torch.manual_seed(0)
    x, w = torch.randn(41, 32, requires_grad=True), torch.randn(4, 32, 16, requires_grad=True)
    offsets = torch.tensor(CUTS["rows behind"])
    seen: list[Compiled] = []
    with observe(seen.append):
        found = torch.compile(grouped_mm, backend="dicp_cpu", fullgraph=True)(x, w, offsets)
    assert [c.claim.name for c in seen[0].program.library_calls] == ["grouped_mm: tiles"]
    torch.testing.assert_close(found, grouped_mm(x, w, offsets))
    for got, wanted in zip(
        torch.autograd.grad(found.sum(), (x, w)), torch.autograd.grad(grouped_mm(x, w, offsets).sum(), (x, w))
    ):
        torch.testing.assert_close(got, wanted)

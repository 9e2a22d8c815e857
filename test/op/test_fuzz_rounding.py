"""The noise in the steps inside a statement of the fuzzer's programs."""

from __future__ import annotations

import pytest
import torch

from dicp.conformance.fuzz_program import (
    Input,
    Program,
    Statement,
    differs,
    eager_dtypes,
    function,
    inputs_of,
    reference,
    run,
    widened,
)


def program(text: str, shape: tuple[int, ...], dtype: str, noisy: bool = True) -> Program:
    """One statement of x0, and its gradient."""
    inputs = (Input("x0", shape, dtype, requires_grad=True),)
    return Program(1, inputs, (Statement("v0", text, ("x0",), noisy, "rule"),), ("v0",), False, True)


def wandering(p: Program, deep: bool, gradient: bool) -> float:
    """How far noise takes the result, or the gradient, in units of its largest element."""
    dtypes = eager_dtypes(p, inputs_of(p))
    exact, *moved = (reference(p, inputs_of(p), dtypes, k, deep) for k in range(5))
    part = int(gradient)
    assert exact is not None and exact[part][0] is not None
    size = exact[part][0].abs().max().clamp(min=1)
    return max(float(((m[part][0] - exact[part][0]) / size).abs().max()) for m in moved if m is not None)


@pytest.mark.parametrize(
    ("text", "gradient"),
    [
        ("torch.softmax({0} @ {0}.mT * 8, -1) @ {0}", True),
        ("F.scaled_dot_product_attention({0} * 8, {0} * 8, {0})", True),
    ],
)
def test_steps_inside_a_statement_round(text: str, gradient: bool) -> None:
    """Scores are large, and a probability is as far off as they are: noise at the ends does not show that."""
    p = program(text, (7, 9), "float64")
    assert wandering(p, True, gradient) > 2 * wandering(p, False, gradient)


def test_what_cancels_inside_a_statement_leaves_its_rounding() -> None:
    """The mean of equal numbers is not always theirs; what is exactly 0 has no size for noise to go by."""
    p = program("F.batch_norm({0} * 0 + 1 / 3, None, None, training=True)", (17, 3), "float64")
    assert 1e3 * wandering(p, False, False) < wandering(p, True, False) < 1e-10


def test_equal_numbers_are_rounded_alike() -> None:
    """A thousand rows that are the same err a thousand times as one does, not as the root of that."""
    p = program("(F.softmax({0}, -1) * 3).expand(1030, -1)", (1, 50), "float16")
    dtypes = eager_dtypes(p, inputs_of(p))
    exact, moved = (reference(p, inputs_of(p), dtypes, k) for k in (0, 1))
    assert exact is not None and moved is not None
    off = moved[0][0] - exact[0][0]
    assert off.abs().min() > 0 and torch.equal(off, off[:1].expand_as(off))
    assert len(set(off[0].sign().tolist())) == 2


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided", "expanded", "negated", "conjugated"])
def test_the_reference_copies_what_the_program_copies(layout: str) -> None:
    """By how its inputs lie."""
    for dtype in ("float32", "complex64"):
        x = Input("x0", (4, 3), dtype, layout).make(1)
        y = widened(x)
        assert torch.equal(x.to(y.dtype), y) and (x.is_neg(), x.is_conj()) == (y.is_neg(), y.is_conj())
        assert x.stride() == y.stride()


def test_exact_statements_stay_exact() -> None:
    """What jumps gets operands that every implementation computes to the last bit."""
    for text in ("torch.floor({0} * 2)", "{0} + 1 - 1", "torch.cat([{0}, {0}]).sum(0)"):
        assert wandering(program(text, (8, 3), "float32", noisy=False), True, False) == 0


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize(
    "text",
    [
        "torch.softmax({0} @ {0}.mT / 8, -1) @ {0}",
        "F.layer_norm({0}, {0}.shape[-1:])",
        "torch.logsumexp({0}, -1)",
        "F.gelu({0}) * torch.sigmoid({0})",
        "{0}.var(0, correction=0)",
    ],
)
def test_more_than_rounding_is_found(text: str, dtype: str) -> None:
    """A hundred eps in one element of results of ordinary size; nothing where nothing is wrong."""
    p = program(text, (16, 9), dtype)
    eager = run(function(p.source()), p, inputs_of(p))
    assert differs(p, False, eager, eager) is None
    for part in (0, 1):
        wrong = [[t.clone() for t in group if t is not None] for group in eager]
        flat = wrong[part][0].flatten()
        flat[flat.abs().argmax()] *= 1 + 100 * torch.finfo(flat.dtype).eps
        wrong[part][0] = flat.reshape(wrong[part][0].shape)
        found = differs(p, False, eager, (wrong[0], wrong[1], wrong[2]))
        assert found is not None and found.kind == ("value", "gradient")[part]

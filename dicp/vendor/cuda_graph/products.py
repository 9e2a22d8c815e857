"""Who computes a product: cuBLAS, or a template (templates/product.py), and cut how.

Without measuring, cuBLAS has what it does at the hardware's limit, ReLU and GELU by tanh behind a bias
included. A template comes first where it saves a pass over the result (another activation, with few terms per
result), where there are so few rows that reading the weights is all the time there is, and for a vocabulary
of an odd size, for which cuBLAS has its slow kernels only. On an H100 in bfloat16, in us (cuBLAS; with a
kernel for GELU behind it; the template; cuBLAS with GELU by tanh inside): 4096x3072x768 32.7, 50.9, 51.1,
36.5; 6304x3072x768 48.1, 78.9, 81.2, 55.2; 256x3072x768 5.2, 7.3, 6.8, 5.9. The chooser measures what is
offered.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from dicp.compat import size_hint
from dicp.config import Config
from dicp.ir import index as ix
from dicp.ir.value import Value
from dicp.ops.library import ACTIVATIONS, NARROW_WEIGHTS
from dicp.schedule.defs import Call, View
from dicp.vendor.base import Claim, dense
from dicp.vendor.cuda_graph.templates import Launched, Operand, claim
from dicp.vendor.cuda_graph.templates.product import MAX_ROWS, Product, Tiling, kernels

aten = torch.ops.aten
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SCALED_ROWS = 64
"""Rows up to which weights of eight bits are read as stored: each tile of rows converts them anew."""
SMALL_M = 16
"""Rows up to which a product with an epilogue is a template: it reads b once, whatever it does besides."""
FUSED_K = {torch.float32: 128, torch.bfloat16: 512, torch.float16: 512}
"""Terms of a sum up to which saving a pass over the result is more than what cuBLAS is faster by: in half
precision 768 are a draw on an H100."""
FEW_TILES = 256
"""Rows up to which, in half precision and with up to twice as many terms, launching a kernel less decides."""
FOLLOWING = (aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor)
UNFUSED_ROWS = 64
"""Rows from which in float32 cuBLAS is slower with a bias: torch asks another library of its then, which
takes kernels of other tiles. On an H200 the two products of BERT's MLP take 82 and 47 us for 256 rows with
one, and at most 32 without; ViT's, for 788, 121 and 66, and at most 52."""
INSIDE = {"relu": False, "gelu_tanh": True}
"""Activations that cuBLAS computes behind a bias; whether it is GELU."""
ALIGNED = 8
"""Elements of half precision: what cuBLAS' fast kernels ask of where rows begin (16 bytes), and of the sizes
along which memory runs. On an H100, 4096x50257x768 in us: cuBLAS 3,250, into aligned rows as well; the
template 620; cuBLAS with a weight of 50,264 rows 450, and 280 to copy to where the caller expects it."""
MULTIPROCESSORS = 132  # where there is no GPU to ask
MAX_SPLIT = 16
HALF_TILES = ((128, 256, 8), (128, 128, 8), (128, 64, 4), (64, 64, 4))
"""Rows, columns and warps. On an H100, 4096x50257x768 into unaligned rows takes 674 us by the first and 826
by the second, 4096x4096x4096 208 and 238."""
TILES = ((128, 64, 8), (64, 64, 4), (32, 64, 4))


def precision() -> str:
    """What torch.backends.cuda.matmul allows for float32. Dynamo compiles again when it changes."""
    # `allow_tf32` raises where the newer setting has been used, which knows of the older
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


@functools.cache
def multiprocessors() -> int:
    if not torch.cuda.is_available():
        return MULTIPROCESSORS
    return int(torch.cuda.get_device_properties().multi_processor_count)


# -- tilings ------------------------------------------------------------------------------------------------


def tilings(
    m: int, n: int, k: int, batch: int, dtype: torch.dtype, few: bool, along_k: bool, widest: int = 256
) -> list[Tiling]:
    """Ways to cut a product, best first. few: m is known; along_k: neighbours in b are neighbours along k;
    widest: columns of a tile at the most."""
    out = []
    if few and m <= MAX_ROWS:
        out += [few_rows(m, n, k, batch, dtype, along_k, wide) for wide in (False, True)]
    if m <= 64:
        height = 16 if m <= 16 else 32 if m <= 32 else 64
        step = 32 if dtype == torch.float32 else 64
        out += [_split(Tiling("tile", height, columns, step), m, n, k, batch) for columns in (64, 32, 128)]
        return out
    half = dtype != torch.float32
    tiles = [Tiling("tile", a, b, 64 if half else 32, warps=w) for a, b, w in (HALF_TILES if half else TILES)]
    fitting = [p for p in tiles if p.n <= widest and p.n < 2 * max(n, 64)]
    # stable: the largest that fills the chip, or those that leave the least of it idle
    fitting.sort(key=lambda p: max(0, multiprocessors() - _count(p, m, n, batch)))
    return [*out, *fitting]


def _count(tiling: Tiling, m: int, n: int, batch: int) -> int:
    rows = 1 if tiling.form == "rows" else -(-m // tiling.m)
    return batch * rows * -(-n // tiling.n)


def few_rows(
    m: int, n: int, k: int, batch: int, dtype: torch.dtype, along_k: bool, wide: bool = False
) -> Tiling:
    """dtype: of the weights. On an H200, in bfloat16, a row by weights of 4096x4096, 11008x4096 and
    4096x11008 takes 10.5, 23.7 and 23.4 us with 4 columns and 1,024 terms a step, 12.3, 27.5 and 29.6 with 8
    and 512."""
    if not along_k:
        columns, step = (64 if wide else 32), 64 // (2 if m > 2 else 1)
    else:
        columns, step = (8, 512) if wide else (4, 1024)
        step = 2 * step // dtype.itemsize // (2 if m > 2 else 1)
        step //= 2 if m > 1 and dtype.itemsize == 1 else 1  # sums are in registers, one for each row and term
        while step > 128 and k % step and k < 4 * step:
            step //= 2
        while columns > 2 and batch * n < 2 * columns * multiprocessors():
            columns //= 2  # rather than parts along k, which a second kernel adds
    return _split(Tiling("rows", m, columns, step, stages=4), m, n, k, batch)


def _split(tiling: Tiling, m: int, n: int, k: int, batch: int) -> Tiling:
    """In parts along k, until there are two programs for each multiprocessor, each of at least four steps."""
    split = 1
    while (
        split < MAX_SPLIT
        and _count(tiling, m, n, batch) * split < 2 * multiprocessors()
        and k >= 8 * split * tiling.k
    ):
        split *= 2
    return Tiling(tiling.form, tiling.m, tiling.n, tiling.k, split, tiling.warps, tiling.stages)


# -- claims --------------------------------------------------------------------------------------------------


def supports_linear(node: fx.Node) -> bool:
    """Whether dicp::linear is formed: where one kernel would compute it."""
    x, w, _, _, act = (*node.args, *[None] * 5)[:5]
    val = node.meta["val"]
    if val.dtype not in FLOATS or not all(v.meta["val"].dtype == val.dtype for v in (x, w)):  # type: ignore[union-attr]
        return False
    return _template_first(node, str(act or "none")) or _inside(node)


def supports_scaled(node: fx.Node) -> bool:
    """Whether dicp::scaled_linear is formed: where rows are few, and all of them are known."""
    operands: list[Any] = [None if a is None else a.meta["val"] for a in node.args[:3]]  # type: ignore[union-attr]
    x, w, scale = operands
    rows, val = _known_rows(node), node.meta["val"]
    if rows is None or not 0 < rows <= SCALED_ROWS or 0 in (*val.shape, *x.shape):
        return False
    floats = (x, val) if scale is None else (x, val, scale)
    known = all(isinstance(n, int) for n in (*val.shape, *w.shape))
    read = x.dtype == val.dtype and w.dtype in NARROW_WEIGHTS and all(v.dtype in FLOATS for v in floats)
    return known and read


def _inside(node: fx.Node) -> bool:
    """Whether cuBLAS does bias and activation in the call."""
    _, _, b, other, act = (*node.args, *[None] * 5)[:5]
    return act in INSIDE and b is not None and other is None and _fast_bias(node)


def _fast_bias(node: fx.Node) -> bool:
    """Whether cuBLAS computes a product with its bias as fast as one without."""
    return node.meta["val"].dtype != torch.float32 or precision() == "tf32"


def unfuses_bias(node: fx.Node) -> bool:
    """Whether the bias of an addmm is left to a kernel."""
    if node.target is not aten.addmm.default:
        return False
    return not _fast_bias(node) and _sizes(node)[0] > UNFUSED_ROWS and node.args[0].meta["val"].dim() == 1  # type: ignore[union-attr]


def _template_first(node: fx.Node, act: str) -> bool:
    m, _, k, _ = _sizes(node)
    few = _known_rows(node)
    if few is not None and few <= MAX_ROWS:
        return True
    if (act == "none" and not _has_other(node)) or _inside(node):
        return False
    if few is not None and m <= SMALL_M:
        return True
    if _kernel_follows(node):
        return False
    dtype = node.meta["val"].dtype
    most = FUSED_K[dtype] * (2 if m <= FEW_TILES and dtype != torch.float32 else 1)
    return act != "none" and k <= most


def _kernel_follows(node: fx.Node) -> bool:
    """Whether a kernel reads the result element by element anyway, which then does what a product would."""
    users = list(node.users or node.next.users)  # what is only offered stands before what it would replace
    return any(
        u.target in FOLLOWING or (u.target is aten.view.default and _kernel_follows(u)) for u in users
    )


def _has_other(node: fx.Node) -> bool:
    return node.target is torch.ops.dicp.linear.default and len(node.args) > 3 and node.args[3] is not None


def _is_linear(node: fx.Node) -> bool:
    return node.target in (torch.ops.dicp.linear.default, torch.ops.dicp.scaled_linear.default)


def _known_rows(node: fx.Node) -> int | None:
    """Rows of the result, where they are known and the operand is one matrix."""
    val = node.meta["val"]
    rows = val.shape[:-1] if _is_linear(node) else val.shape[-2:-1]
    count = 1
    for n in rows:
        if not isinstance(n, int):
            return None
        count *= n
    return count


def _factors(node: fx.Node) -> tuple[Any, Any]:
    """a: [.., M, K] and b, fake."""
    a, b = node.args[1:3] if node.target in (aten.addmm.default, aten.baddbmm.default) else node.args[:2]
    return a.meta["val"], b.meta["val"]  # type: ignore[union-attr]


def _sizes(node: fx.Node) -> tuple[int, int, int, int]:
    """(m, n, k, batch) as seen while tracing"""
    a, _ = _factors(node)
    shape = [size_hint(n) for n in node.meta["val"].shape]
    if _is_linear(node):
        rows = 1
        for n in shape[:-1]:
            rows *= n
        return rows, shape[-1], size_hint(a.shape[-1]), 1
    return shape[-2], shape[-1], size_hint(a.shape[-1]), shape[0] if len(shape) == 3 else 1


def candidates(node: fx.Node, config: Config, library: Claim) -> list[Claim]:
    """The claims of a product, `library` among them, the one to take without measuring first."""
    val = node.meta["val"]
    a, b = _factors(node)
    if config.numerics == "eager" or val.dtype not in FLOATS or not a.dtype == b.dtype == val.dtype:
        return [library]
    if not all(size_hint(n) for n in (*val.shape, a.shape[-1])):
        return [library]
    linear = node.target is torch.ops.dicp.linear.default
    m, n, k, batch = _sizes(node)
    rows = _known_rows(node)
    along_k = size_hint(b.stride(-1 if linear else -2)) == 1
    cuts = tilings(m if rows is not None else max(m, 64), n, k, batch, val.dtype, rows is not None, along_k)
    made: list[Claim] = [_template(node, config, tiling) for tiling in dict.fromkeys(cuts)]
    if linear:
        first = _template_first(node, str((*node.args, *[None] * 5)[4] or "none"))
    else:
        library = in_parts(node) or library
        first = (batch == 1 and rows is not None and rows <= MAX_ROWS) or _odd_columns(node)
    return [made[0], library, *made[1:]] if first else [library, *made]


def scaled(node: fx.Node, config: Config) -> list[Claim]:
    """The claims of a dicp::scaled_linear, the one to take without measuring first. No library reads
    eight bits."""
    m, n, k, _ = _sizes(node)
    x, w = _factors(node)
    along_k = size_hint(w.stride(-1)) == 1
    few = [few_rows(m, n, k, 1, w.dtype, along_k, wide) for wide in (False, True)] if m <= MAX_ROWS else []
    tiles = tilings(max(m, MAX_ROWS + 1), n, k, 1, x.dtype, True, along_k)
    return [_template(node, config, tiling) for tiling in dict.fromkeys([*few, *tiles])]


def _template(node: fx.Node, config: Config, tiling: Tiling) -> Claim:
    linear = _is_linear(node)

    def made(c: Call) -> Sequence[Launched]:
        product = _linear(c) if linear else _matrix(c)
        return kernels(product, tiling, (c.note,) if c.note else (), config.interpret)

    name = f"{_name(node)}: Triton {tiling}"
    if linear:
        other = 4 if node.target is torch.ops.dicp.scaled_linear.default else 3
        return claim(name, made, prepare=dense(0, other))
    return claim(name, made, strides=aligned_rows, prepare=aligned_operands)


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "_opname", node.target))


def _linear(c: Call) -> Product:
    """act(x @ w.T * scale + b) + other, leading dims taken as one."""
    scaled = c.node.target is torch.ops.dicp.scaled_linear.default
    scale = c.args[2] if scaled else None
    x, w, bias, other, act = (*c.args[:2], *c.args[3 if scaled else 2 :], *[None] * 3)[:5]
    y = c.outputs[0]
    m, k, n = ix.product(x.shape[:-1]), x.shape[-1], y.shape[-1]
    out = View(y, y.shape, y.strides)
    return Product(
        "linear" if act in (None, "none") else f"linear_{act}",
        1,
        m,
        n,
        k,
        Operand("x", x, (0, k, 1)),
        Operand("w", w, (0, w.strides[1], w.strides[0])),
        Operand("out", out, (0, n, 1)),
        None if bias is None else Operand("bias", bias, (0, 0, bias.strides[0])),
        other=None if other is None else Operand("other", other, (0, n, 1)),
        act=act or "none",
        precision=precision(),
        scale=None if scale is None else Operand("scale", scale, (0, 0, *(scale.strides or (0,)))),
    )


def _matrix(c: Call) -> Product:
    """mm, addmm, bmm, baddbmm, with whatever strides the operands have."""
    added = c.node.target in (aten.addmm.default, aten.baddbmm.default)
    bias, a, b = c.args[:3] if added else (None, *c.args[:2])
    y = c.outputs[0]
    batch = y.shape[0] if len(y.shape) == 3 else 1
    out = View(y, y.shape, y.strides)
    alpha, beta = (c.kwargs.get(name, 1) for name in ("alpha", "beta"))
    return Product(
        str(c.node.target._opname),
        batch,
        y.shape[-2],
        y.shape[-1],
        a.shape[-1],
        Operand("a", a, _three(a)),
        Operand("b", b, _three(b)),
        Operand("out", out, _three(out)),
        None if bias is None or beta == 0 else Operand("bias", bias, _broadcast(bias, y.shape)),
        alpha=alpha,
        beta=beta,
        precision=precision(),
    )


def _three(v: View) -> tuple[Any, Any, Any]:
    return (0, *v.strides) if len(v.shape) == 2 else tuple(v.strides)  # type: ignore[return-value]


def _broadcast(v: View, shape: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Strides along the result's axes of something that is spread over it."""
    strides = [0 if n == 1 else s for n, s in zip(v.shape, v.strides, strict=True)]
    return tuple([0] * (3 - len(strides)) + strides)  # type: ignore[return-value]


# -- sizes that 8 does not divide ----------------------------------------------------------------------------


def aligned_rows(lowering: Any, node: fx.Node, args: Sequence[Any]) -> Any:
    """Strides of a large product of half precision whose rows would begin anywhere: rows that begin at 16
    bytes, for those who read them. Not of what the caller is given."""
    if not _odd_columns(node) or _returned(node):
        return None
    return [(-(-node.meta["val"].shape[1] // ALIGNED) * ALIGNED, 1)]


def _odd_columns(node: fx.Node) -> bool:
    """Whether the template computes it at the speed of cuBLAS, which 8 would have to divide it for."""
    if not _large(node) or node.meta["val"].shape[1] % ALIGNED == 0:
        return False
    m, n, _, _ = _sizes(node)
    return -(-m // 128) * -(-n // 128) >= multiprocessors()


def _returned(node: fx.Node) -> bool:
    """Whether a product is a result of the graph, or a view of it is."""
    return any(u.op == "output" or (u.target is aten.view.default and _returned(u)) for u in node.users)


def aligned_operands(lowering: Any, node: fx.Node, args: Sequence[Any]) -> Sequence[Any]:
    """Its matrices, of which those whose rows begin anywhere are copied: the gradient of such logits, for the
    two products of the backward."""
    if not _large(node):
        return args
    matrices = (1, 2) if node.target is aten.addmm.default else (0, 1)
    return [
        lowering.aligned(a, ALIGNED) if k in matrices and isinstance(a, Value) else a
        for k, a in enumerate(args)
    ]


def _large(node: fx.Node) -> bool:
    """Whether a product of half precision, of known sizes, takes longer than copies of what it reads and
    writes."""
    val = node.meta["val"]
    known = all(isinstance(n, int) for n in (*val.shape, *_factors(node)[0].shape))
    if val.dim() != 2 or val.element_size() != 2 or not known:
        return False
    m, n, k, _ = _sizes(node)
    return m >= FEW_TILES // 2 and n >= FEW_TILES and k >= FEW_TILES


def in_parts(node: fx.Node) -> Claim | None:
    """A large product by cuBLAS where 8 does not divide how many terms or, along memory, rows it has, as in
    the gradients of odd vocabularies."""
    if node.target is not aten.mm.default or not _large(node) or node.meta["val"].shape[1] % ALIGNED:
        return None
    a, _ = _factors(node)
    if a.shape[1] % ALIGNED == 0 and (a.shape[0] % ALIGNED == 0 or a.stride(0) != 1):
        return None

    def emit(w: Any, c: Call) -> None:
        a, b = (w.value(x) for x in c.args)
        w.line(f"{w.name('multiply', multiply)}({a}, {b}, {w.into(c.outputs[0])})", c.note)

    return Claim("mm: cuBLAS in parts", emit, out=True, prepare=aligned_operands)


def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """a @ b into out: as much of it as multiples of 8 are in one call, which has fast kernels, the rest in
    others. What is left of the terms comes first: it is small, and so is what rounding it takes away."""
    m, k = a.shape
    rows = m // ALIGNED * ALIGNED if a.stride(0) == 1 else m
    terms = k // ALIGNED * ALIGNED
    most = out[:rows]
    if terms < k:
        torch.mm(a[:rows, terms:], b[terms:], out=most)
        torch.addmm(most, a[:rows, :terms], b[:terms], out=most)
    else:
        torch.mm(a[:rows], b, out=most)
    if rows < m:
        torch.mm(a[rows:], b, out=out[rows:])


# -- the library, for dicp::linear ---------------------------------------------------------------------------


def linear_into(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, b: Any, other: Any, act: str) -> None:
    """dicp::linear by cuBLAS, and what follows it by aten, into y."""
    rows, out = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
    if b is not None and act in INSIDE and y.is_cuda:
        aten._addmm_activation.out(b, rows, w.t(), use_gelu=INSIDE[act], out=out)
        act = "none"
    elif b is None:
        torch.mm(rows, w.t(), out=out)
    else:
        torch.addmm(b, rows, w.t(), out=out)
    if act != "none":
        y.copy_(ACTIVATIONS[act](y))
    if other is not None:
        y.add_(other)


def linear_library(node: fx.Node) -> Claim:
    def emit(w: Any, c: Call) -> None:
        x, weight, b, other, act = (*c.args, *[None] * 5)[:5]
        args = [w.into(c.outputs[0]), *(w.value(v) for v in (x, weight, b, other)), repr(act or "none")]
        w.line(f"{w.name('linear_into', linear_into)}({', '.join(args)})", c.note)

    return Claim("linear: cuBLAS", emit, out=True, prepare=dense(0, 3))


__all__ = [
    "candidates",
    "few_rows",
    "linear_library",
    "tilings",
    "precision",
    "scaled",
    "supports_linear",
    "supports_scaled",
]

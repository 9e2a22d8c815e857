"""The part of the operator suite that CI runs: operators that stand for every rule of lowering, in few
dtypes.
"""

from __future__ import annotations

import re

from dicp.conformance import opdb
from dicp.conformance.unit import Unit

# One or two of each kind: what they have in common is tried elsewhere on all of them.
ELEMENTWISE = (
    "abs",
    "add",
    "atan2",
    "bitwise_and",
    "clamp",
    "copysign",
    "div.floor_rounding",
    "erf",
    "exp",
    "floor_divide",
    "fmod",
    "gcd",
    "isnan",
    "lerp",
    "log1p",
    "logical_xor",
    "maximum",
    "mul",
    "nan_to_num",
    "nn.functional.gelu",
    "nn.functional.silu",
    "pow",
    "remainder",
    "round",
    "rsqrt",
    "sigmoid",
    "sign",
    "sub",
    "tanh",
    "where",
)
REDUCTIONS = (
    "all",
    "amax",
    "argmax",
    "count_nonzero",
    "cumsum",
    "logsumexp",
    "mean",
    "nn.functional.layer_norm",
    "nn.functional.rms_norm",
    "prod",
    "softmax",
    "std",
    "sum",
    "var_mean",
)
VIEWS = (
    "as_strided",
    "cat",
    "chunk",
    "constant_pad_nd",
    "diagonal",
    "expand",
    "flip",
    "nn.functional.pad.reflect",
    "permute",
    "reshape",
    "roll",
    "slice",
    "split",
    "stack",
    "T",
    "tril",
    "unfold",
    "view",
    "unbind",
)
INDEXING = (
    "__getitem__",
    "gather",
    "index_add",
    "index_put",
    "index_select",
    "masked_fill",
    "scatter",
    "scatter_add",
    "nn.functional.embedding",
    "take_along_dim",
)
LIBRARY = (
    "addmm",
    "bmm",
    "matmul",
    "nn.functional.conv2d",
    "nn.functional.linear",
    "nn.functional.scaled_dot_product_attention",
    "sort",
    "topk",
)
OTHERS = (
    "arange",
    "bernoulli",
    "nn.functional.avg_pool2d",
    "nn.functional.batch_norm",
    "nn.functional.cross_entropy",
    "nn.functional.dropout",
    "nn.functional.interpolate.bilinear",
    "nn.functional.max_pool2d",
    "full_like",
    "copysign",
    "extra.rotary",
    "extra.swiglu",
    "linalg.inv",
    "fft.rfft",
    "nonzero",
    "zero_",
    "to",
)

STATIC = ELEMENTWISE + REDUCTIONS + VIEWS + INDEXING + LIBRARY + OTHERS
INTEGER = (
    "add",
    "bitwise_and",
    "floor_divide",
    "gcd",
    "sum",
    "cumsum",
    "argmax",
    "cat",
    "remainder",
    "sign",
    "pow",
    "scatter_add",
    "to",
)
HALF = (
    "add",
    "exp",
    "sum",
    "softmax",
    "nn.functional.layer_norm",
    "addmm",
    "cat",
    "nn.functional.silu",
    "cumsum",
)
DYNAMIC = (
    "add",
    "sum",
    "softmax",
    "cat",
    "reshape",
    "gather",
    "addmm",
    "nn.functional.layer_norm",
    "slice",
    "index_select",
)
GRADIENT = (
    "add",
    "mul",
    "nn.functional.gelu",
    "sum",
    "softmax",
    "nn.functional.layer_norm",
    "gather",
    "cat",
    "nn.functional.linear",
    "nn.functional.conv2d",
    "nn.functional.cross_entropy",
    "index_select",
    "extra.swiglu",
    "std",
    "where",
)


def ci_units() -> list[Unit]:
    """The slice, in a fixed order."""
    rows = [(name, "float32", "forward", False) for name in STATIC]
    rows += [(name, "int64", "forward", False) for name in INTEGER]
    rows += [(name, "bfloat16", "forward", False) for name in HALF]
    rows += [(name, "float32", "forward", True) for name in DYNAMIC]
    rows += [(name, "float32", "gradient", False) for name in GRADIENT]
    known = opdb.operators()
    units = []
    for name, dtype, mode, dynamic in dict.fromkeys(rows):
        able = known[name].grad_dtypes if mode == "gradient" else known[name].dtypes
        if any(str(d) == f"torch.{dtype}" for d in able):
            units.append(Unit(name, dtype, mode, dynamic, 2 if dynamic else 3))  # type: ignore[arg-type]
    return units


def operators() -> str:
    """A regular expression of the slice's operators, for runs of more dtypes and modes."""
    return "^(" + "|".join(re.escape(name) for name in sorted({u.op for u in ci_units()})) + ")$"


if __name__ == "__main__":
    print(operators())

"""Ops of ATen's CPU library that are called through its dispatcher: which, and how arguments become words.

An op is here because kernels should not, or cannot, do its work: the reason stands above each group. Every
call is written from the op's schema; what the dispatcher's words cannot carry (a Scalar, a generator, sparse
and quantised tensors) is not claimed and stays an extern.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
from torch._ops import OpOverload

from dicp.ir.memory_order import no_overlap
from dicp.ops.aliases import returns_alias
from dicp.schedule.defs import Call, View
from dicp.schedule.traced import is_strided
from dicp.vendor.base import Claim
from dicp.vendor.cpu_graph.claims.common import SHIM, aten, full_args
from dicp.vendor.cpu_graph.segment import DTYPE_CODES

# Draws from torch's generator, in eager's order: equal seeds give equal numbers.
RANDOM = """bernoulli cauchy exponential geometric log_normal multinomial normal normal_functional poisson
    binomial rand rand_like randint randint_like randn randn_like randperm uniform _standard_gamma
    _sample_dirichlet native_dropout"""

# LAPACK, through ATen's drivers, and what checks its results.
LINEAR_ALGEBRA = """_linalg_check_errors _linalg_det _linalg_eigh _linalg_eigvals _linalg_slogdet
    _linalg_solve_ex _linalg_svd cholesky cholesky_inverse cholesky_solve geqrf linalg_cholesky_ex linalg_eig
    linalg_eigvals linalg_householder_product linalg_inv_ex linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq
    linalg_lu linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp linalg_pinv linalg_qr
    linalg_solve_triangular lu_unpack ormqr triangular_solve _cholesky_solve_helper"""

TRANSFORMS = "_fft_c2c _fft_c2r _fft_r2c"

# Products that BLAS and oneDNN do not have: integers, three operands, a table of distances, groups of rows.
PRODUCTS = """mm bmm mv dot vdot _int_mm _grouped_mm _trilinear _cdist_forward _cdist_backward _pdist_forward
    _pdist_backward conv_tbc conv_tbc_backward _euclidean_dist"""

# How large the result is depends on the data.
SIZED_BY_DATA = """nonzero masked_select _unique _unique2 unique_dim unique_consecutive unique_dim_consecutive
    repeat_interleave index bincount"""

# Selection, counting and searching: algorithms with state, for which a kernel per element is no form.
SELECTION = """kthvalue mode median nanmedian histc histogram _histogramdd_bin_edges _histogramdd_from_bin_cts
    _histogramdd_from_bin_tensors nonzero_static segment_reduce _segment_reduce_backward hash_tensor
    masked_scatter_backward fractional_max_pool2d fractional_max_pool2d_backward fractional_max_pool3d
    fractional_max_pool3d_backward embedding_renorm _embedding_bag _embedding_bag_forward_only
    _embedding_bag_dense_backward _embedding_bag_per_sample_weights_backward _ctc_loss _ctc_loss_backward
    grid_sampler_2d grid_sampler_2d_backward grid_sampler_3d grid_sampler_3d_backward _upsample_bilinear2d_aa
    _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa _upsample_bicubic2d_aa_backward"""

# Special functions: tables of coefficients and data-dependent loops that ATen's kernels hold.
SPECIAL = """frexp igamma igammac polygamma special_airy_ai special_bessel_j0 special_bessel_j1
    special_bessel_y0 special_bessel_y1 special_chebyshev_polynomial_t special_chebyshev_polynomial_u
    special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_hermite_polynomial_h
    special_hermite_polynomial_he special_laguerre_polynomial_l special_legendre_polynomial_p
    special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
    special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0
    special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t
    special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v
    special_shifted_chebyshev_polynomial_w special_spherical_bessel_j0 special_zeta"""

# Complex tensors, which kernels do not hold.
COMPLEX = """_conj _conj_physical _to_copy abs add angle clone complex constant_pad_nd copy detach diagonal
    diagonal_scatter div expand mul new_zeros permute polar select slice slice_scatter squeeze sub transpose
    unsqueeze view view_as_complex view_as_real"""

# Ops with a Scalar, which words cannot carry, for which the C interface has a function that takes a double.
SHIM_CALLS = {
    aten.histc.default: "histc",
    aten.add.Tensor: "add_Tensor",
    aten.mul.Scalar: "mul_Scalar",
}

GROUPS = (RANDOM, LINEAR_ALGEBRA, TRANSFORMS, PRODUCTS, SIZED_BY_DATA, SELECTION, SPECIAL, COMPLEX)
OPS = frozenset(name for group in GROUPS for name in group.split())


def aten_call(node: fx.Node) -> Claim | None:
    """The dispatcher's call of the node's own op, None where it is not for this library or not carried."""
    op = node.target
    if not isinstance(op, OpOverload) or op.namespace != "aten" or op._opname not in OPS:
        return None
    if not _results_carried(node):
        return None
    given = list(zip(op._schema.arguments, full_args(op, node.args, node.kwargs), strict=True))
    if op in SHIM_CALLS:
        val = node.meta["val"]  # to an integer tensor a double would be another number than the user's
        inexact = val.is_floating_point() or val.is_complex()
        plain = all(carried(a.type, v) or inexact and _is_scalar(a.type, v) for a, v in given)
        return Claim(f"{op._opname}: ATen", _shim_call, as_traced=True) if plain else None
    if op._schema.is_mutable or not all(carried(a.type, v) for a, v in given):
        return None
    return Claim(f"{op._opname}: ATen", _emit, as_traced=True)


def _is_scalar(kind: Any, value: Any) -> bool:
    """Whether it is a Scalar that C's double stands for."""
    return kind.kind() == "NumberType" and isinstance(value, (int, float))


def _results_carried(node: fx.Node) -> bool:
    """Whether the results are tensors that a program can hold."""
    val = node.meta.get("val")
    vals = val if isinstance(val, (tuple, list)) else [val]
    return all(
        v is None
        or isinstance(v, torch.Tensor)
        and is_strided(v)
        and v.dtype in DTYPE_CODES
        and (no_overlap(v) or not returns_alias(node.target))
        for v in vals
    )


def carried(kind: Any, value: Any) -> bool:
    """Whether an argument of this schema type fits a word. `value`: as in the FX graph."""
    name = kind.kind()
    if name == "OptionalType":
        return value is None or carried(kind.getElementType(), value)
    if name == "ListType":
        single = not isinstance(value, (list, tuple))
        inner = kind.getElementType()
        return not single and all(carried(inner, v) for v in value)
    if name == "TensorType":
        val = value.meta.get("val") if isinstance(value, fx.Node) else None
        return isinstance(val, torch.Tensor) and is_strided(val) and val.dtype in DTYPE_CODES
    if isinstance(value, fx.Node):
        return name == "IntType" and isinstance(value.meta.get("val"), (torch.SymInt, int))
    return _WORDS.get(name, lambda v: False)(value)


_LAYOUTS = {torch.strided: 0}
_FORMATS = {torch.contiguous_format: 0, torch.preserve_format: 1, torch.channels_last: 2}


def _integral(value: Any) -> bool:
    """Integers, and the enumerations that schemas hand on as integers."""
    known = (*DTYPE_CODES, *_LAYOUTS, *_FORMATS)
    return isinstance(value, (int, torch.SymInt)) or any(value is k for k in known)


_WORDS = {
    "IntType": _integral,
    "FloatType": lambda v: isinstance(v, (int, float)),
    "BoolType": lambda v: isinstance(v, bool),
    "StringType": lambda v: isinstance(v, str) and v.isprintable() and v.isascii(),
    "ScalarTypeType": _integral,
    "LayoutType": _integral,
    "MemoryFormatType": _integral,
    "DeviceObjType": lambda v: v == torch.device("cpu"),
}


def _emit(w: Any, call: Call) -> None:
    op = call.node.target
    if op is aten._conj.default:  # a view with a mark, which memory alone does not show
        op = aten._conj_physical.default
    values = full_args(op, call.args, call.kwargs)
    words = [word(w, a.type, v) for a, v in zip(op._schema.arguments, values, strict=True)]
    lists = op._schema.returns[0].type.kind() == "ListType" if op._schema.returns else False
    w.dispatch(call, f"aten::{op._opname}", op._schema.overload_name, words, returns_alias(op), lists)


def word(w: Any, kind: Any, value: Any) -> str:
    """The C++ expression of an argument's word."""
    name = kind.kind()
    if name == "OptionalType":
        inner = kind.getElementType()
        # the device that an optional leaves open is the CPU
        absent = value is None or inner.kind() == "DeviceObjType"
        return "0" if absent else f"some({word(w, inner, value)})"
    if name == "ListType":
        items = [word(w, kind.getElementType(), v) for v in value]
        if not items:
            return "list(nullptr, 0)"
        array = w.fresh("items")
        w.lines.append(f"const Word {array}[] = {{{', '.join(items)}}};")
        return f"list({array}, {len(items)})"
    if isinstance(value, View):
        return f"word({w.tensor_object(value)})"
    if name == "FloatType":
        return f"word({_double(float(value))})"
    if name == "StringType":
        return f'word("{value}")'
    for codes in (DTYPE_CODES, _LAYOUTS, _FORMATS):
        for key, code in codes.items():
            if value is key:
                return str(code)
    return f"word((int64_t)({w.text(int(value) if isinstance(value, bool) else value)}))"


def _double(x: float) -> str:
    if x != x:
        return '__builtin_nan("")'
    return repr(x) if abs(x) != float("inf") else ("-" if x < 0 else "") + "__builtin_inf()"


def _shim_call(w: Any, call: Call) -> None:
    op = call.node.target
    given = []
    for a, v in zip(op._schema.arguments, full_args(op, call.args, call.kwargs), strict=True):
        scalar = a.type.kind() in ("NumberType", "FloatType")
        given.append(w.tensor(v) if isinstance(v, View) else _double(float(v)) if scalar else w.text(v))
    w.call(call, SHIM + SHIM_CALLS[op], given, of_user=True)

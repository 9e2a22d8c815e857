"""Generated C++ kernels against the kernel interpreter, and the interpreter against eager PyTorch.

Every case is traced through the real bridge; each of its kernels is run on the very memory the program would give it,
for each instruction set of this machine, once with fresh results and once in place where the memory plan may do that.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lowered import Memory, program_of, threads, traced
from walls import walled

from dicp.config import Config
from dicp.errors import BuildError, OptionError
from dicp.ir.interpret_kernel import run_kernel
from dicp.runtime.program import Program
from dicp.schedule.kernels import Launch
from dicp.vendor.cpu_graph import codegen, loops, toolchain
from dicp.vendor.cpu_graph.assemble import PRELUDE
from dicp.vendor.cpu_graph.build import Unit, build
from dicp.vendor.cpu_graph.outlining import Emitted, outline

ISAS = ("avx512", "avx2", "portable")
GUARD = 64  # elements behind each buffer that nothing may write
GENERATOR = torch.Generator()


@dataclasses.dataclass(frozen=True)
class Case:
    fn: Callable[..., Any]
    inputs: tuple[Any, ...]
    dynamic: bool = False
    train: bool = False


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random elements, with NaN, both infinities and both zeros among them where the dtype has them and there is room."""
    g = GENERATOR.manual_seed(sum(shape))
    if dtype == torch.bool:
        return torch.rand(shape, generator=g) < 0.5
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return torch.randint(max(info.min, -1000), min(info.max, 1000), shape, generator=g).to(dtype)
    return (torch.randn(shape, generator=g) * 2).to(dtype)


def odd(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`rand` with special values."""
    x = rand(*shape, dtype=dtype)
    flat = x.view(-1)
    for k, v in enumerate((float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-42, 3e38)):
        flat[k * 7 % flat.numel()] = v
    return x


NARROW = (torch.int8, torch.uint8, torch.int16)


def below(n: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, n, shape, generator=GENERATOR.manual_seed(n))


def rms(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def many_pieces(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """More than one kernel is to write, some of them constants."""
    pieces = [p for k in range(70) for p in (x * (k + 1), y[:, k : k + 1].exp(), torch.zeros_like(x))]
    return torch.cat(pieces, 1)


def overwritten(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Copies of rows from one tensor or another, and zeros."""
    z = F.pad(x, (1, 2, 0, 2))
    z[:, 2:5, 1:41] = y
    return z


def looked_up_and_padded(x: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Conditions in memory, which ends where the padding begins."""
    return F.pad(torch.ops.aten._unsafe_masked_index(x, mask, [rows, None], 0), (0, 0, 3, 3))


def twisted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.cat([F.pad(x, (1, 2)), y.flip(1)], 1).roll(3, 1).tril(2)


def unfused(x: torch.Tensor) -> torch.Tensor:
    x = x - x.mean(1, keepdim=True)
    x = x / (x.square().mean(1, keepdim=True).sqrt() + 1)
    return x.softmax(1) + x.amax(1, keepdim=True)


CASES: dict[str, Case] = {
    "few_channels_to_channels_last": Case(
        lambda x: (x * 2).contiguous(memory_format=torch.channels_last), (odd(2, 3, 5, 37),)
    ),
    # one value per point
    "pointwise_tail": Case(lambda x, y: torch.relu(x * y + 1) - y, (rand(3, 37), rand(3, 37))),
    "pointwise_odd_values": Case(
        lambda x: (
            x.exp(),
            x.log(),
            x.sqrt(),
            x.tanh(),
            x.sigmoid(),
            x.clamp(-1, 1),
            x.sign(),
            torch.maximum(x, x.flip(0)),
            x.isnan(),
            x.erf(),
        ),
        (odd(77),),
    ),
    "pointwise_one_element": Case(lambda x, y: x * 2 + y, (rand(), rand(1))),
    "pointwise_shorter_than_a_vector": Case(lambda x: x.cos() * x, (rand(3),)),
    "pointwise_transposed": Case(lambda x, y: (x.t() + y, x.t() * 2), (rand(19, 35), rand(35, 19))),
    "pointwise_broadcast": Case(lambda x, y, z: x + y * z.sigmoid(), (rand(5, 1, 33), rand(7, 1), rand(33))),
    "pointwise_strided": Case(lambda x: x[:, ::2, 3:] * 2, (rand(4, 9, 21),)),
    "pointwise_bf16": Case(lambda x, y: torch.tanh(x * y) + x, (rand(5, 43, dtype=torch.bfloat16),) * 2),
    "pointwise_bf16_odd_values": Case(lambda x: (x * 3, x.float(), x > 0), (odd(70, dtype=torch.bfloat16),)),
    "pointwise_f16": Case(lambda x, y: x * y - x.abs(), (rand(5, 43, dtype=torch.float16),) * 2),
    "pointwise_f64": Case(lambda x, y: x.sin() * y + x.pow(3), (rand(5, 43, dtype=torch.float64),) * 2),
    "pointwise_mixed": Case(
        lambda x, y, z: x + y + z, (rand(70), rand(70, dtype=torch.int32), rand(70, dtype=torch.bfloat16))
    ),
    "integers": Case(
        lambda x, y: (
            x * y,
            x // (y.abs() + 1),
            x % (y.abs() + 1),
            x & y,
            x ^ y,
            ~x,
            x << 3,
            x >> 1,
            torch.minimum(x, y),
            x.abs(),
            -x,
        ),
        (rand(53, dtype=torch.int32), rand(53, dtype=torch.int32).flip(0)),
    ),
    "integers_64": Case(
        lambda x, y: (x * y * 123456789123, x // (y.abs() + 1), torch.remainder(x, 7), x > y),
        (rand(53, dtype=torch.int64), rand(53, dtype=torch.int64).flip(0)),
    ),
    "integers_narrow": Case(
        lambda x, y: (x + y, x * y, x.to(torch.int16) * 300, x.float() / 3),
        (rand(53, dtype=torch.uint8), rand(53, dtype=torch.uint8).flip(0)),
    ),
    "integers_8_overflow": Case(lambda x: (x * x, x + 100), (rand(41, dtype=torch.int8),)),
    "bools": Case(
        lambda x, y: (x & y, x | ~y, x ^ y, x + y, x * y, x.int() * 2, torch.where(x, y, ~y), x == y),
        (rand(45, dtype=torch.bool), rand(45, dtype=torch.bool).flip(0)),
    ),
    "where_of_conditions": Case(
        lambda x, y: torch.where((x > 0) & (y < 0.5), x, y.exp()), (odd(6, 21), odd(6, 21))
    ),
    "casts": Case(
        lambda x: (
            x.to(torch.int32),
            x.to(torch.float16),
            x.to(torch.bool),
            x.to(torch.float64),
            x.to(torch.int8),
            x.to(torch.int64),
        ),
        (rand(47),),
    ),
    # rows
    "rows_sum": Case(lambda x: (x.sum(1), x.mean(1), x.prod(1), x.amax(1), x.amin(1)), (rand(5, 101),)),
    "rows_odd_values": Case(
        lambda x: (x.amax(1), x.amin(1), x.sum(1), x.argmax(1), x.argmin(1)), (odd(9, 33),)
    ),
    "rows_any_all": Case(lambda x: ((x > 3).any(1), (x > -3).all(1), (x > 0).sum(1)), (rand(6, 45),)),
    "rows_argmax_ties": Case(lambda x: (x.argmax(1), x.argmin(1), x.max(1)[1]), (rand(7, 70).round(),)),
    "rows_of_integers": Case(
        lambda x: (x.sum(1), x.amax(1), x.argmax(1), x.prod(1)), (rand(6, 39, dtype=torch.int32),)
    ),
    # a result in place of an operand that is read by what is computed after it
    "rows_result_before_last_pass": Case(
        lambda x, t: ((s := x.sum(1)), x * s[:, None] - t[:, None]), (rand(5, 83), rand(5))
    ),
    "columns_result_before_last_pass": Case(
        lambda x, t: ((s := x.sum(0)), x * s - t), (rand(9, 45), rand(45))
    ),
    "rows_two_results": Case(lambda x, t: ((s := x.sum(1)) * 2, s * t), (rand(5, 83), rand(5))),
    "columns_two_results": Case(lambda x, t: ((s := x.sum(0)) * 2, s * t), (rand(9, 45), rand(45))),
    "rows_short": Case(lambda x: (x.sum(1), x.softmax(1)), (rand(50, 3),)),
    "rows_of_two_dims": Case(lambda x: x.sum((1, 3)), (rand(3, 4, 5, 17),)),
    "rows_bf16": Case(lambda x: (x.sum(1), x.softmax(1)), (rand(5, 77, dtype=torch.bfloat16),)),
    "rows_f64": Case(lambda x: (x.sum(1), x.var(1), x.argmax(1)), (rand(5, 77, dtype=torch.float64),)),
    "rows_long_split": Case(lambda x: (x.sum(), x.amax(), x.mean()), (rand(70000),)),
    "rows_welford": Case(
        lambda x: (x.var(1), x.std(1, unbiased=False), *torch.var_mean(x, 1)), (rand(6, 83) + 100,)
    ),
    "rows_welford_split": Case(lambda x: torch.var_mean(x), (rand(65536) + 100,)),
    "rows_norm": Case(lambda x: (x.norm(dim=1), torch.linalg.vector_norm(x, 1, 1)), (rand(6, 83),)),
    # several phases
    "softmax": Case(lambda x: x.softmax(1), (rand(6, 83),)),
    "log_softmax": Case(lambda x: x.log_softmax(1), (rand(6, 83) * 20,)),
    "layer_norm": Case(
        lambda x, r, w, b: F.layer_norm(x + r, (65,), w, b), (rand(7, 65), rand(7, 65), rand(65), rand(65))
    ),
    "rms_norm_bf16": Case(rms, (rand(7, 64, dtype=torch.bfloat16), rand(64, dtype=torch.bfloat16))),
    "group_norm": Case(lambda x, w, b: F.group_norm(x, 3, w, b), (rand(2, 6, 5, 7), rand(6), rand(6))),
    # axes in parts, since quotients of them are read at
    "group_norm_by_channels": Case(
        lambda x, w, b: F.group_norm(x.permute(0, 3, 1, 2), 4, w, b).permute(0, 2, 3, 1).contiguous(),
        (rand(2, 3, 5, 48), rand(48), rand(48)),
    ),
    "windows_as_rows": Case(
        lambda x: x.permute(0, 3, 1, 2).unfold(2, 3, 1).unfold(3, 3, 1).permute(0, 2, 3, 1, 4, 5).flatten(3) * 2,
        (rand(2, 6, 5, 24),),
    ),
    "divided_twice": Case(
        lambda x, y, z: x * 2 + y.repeat_interleave(6) + z.repeat_interleave(30),
        (rand(30 * 7), rand(35), rand(7)),
    ),
    "divided_unevenly": Case(lambda x: x[torch.arange(50) // 3 % 5] * 2, (rand(5),)),
    "batch_norm": Case(
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True), (rand(4, 5, 6, 7), rand(5), rand(5))
    ),
    "four_phases": Case(unfused, (rand(5, 59),)),
    "cross_entropy": Case(lambda x, t: F.cross_entropy(x, t), (rand(8, 31), below(31, 8))),
    "masked_softmax": Case(
        lambda x, m: x.masked_fill(m, -float("inf")).softmax(-1), (rand(4, 37), rand(4, 37) > 0.7)
    ),
    # columns
    "columns_sum": Case(lambda x: (x.sum(0), x.amax(0), x.prod(0)), (rand(11, 70),)),
    "columns_wide": Case(lambda x: x.sum(0), (rand(9, 128),)),
    "columns_odd_values": Case(lambda x: (x.amax(0), x.argmax(0), x.argmin(0), x.amin(0)), (odd(9, 33),)),
    "columns_softmax": Case(lambda x: x.softmax(0), (rand(9, 45),)),
    "columns_welford": Case(lambda x: torch.var_mean(x, 0), (rand(21, 35) + 10,)),
    "columns_welford_split": Case(lambda x: torch.var_mean(x, 0), (rand(8192, 18) + 10,)),
    "columns_bf16": Case(lambda x: x.sum(0), (rand(17, 39, dtype=torch.bfloat16),)),
    "columns_split": Case(lambda x: x.sum(0), (rand(8192, 24),)),
    "columns_of_middle": Case(lambda x: (x.mean(1), x.amax(1)), (rand(3, 7, 33),)),
    "both_ways": Case(lambda x: (x.sum(0), x.sum(1), x * 2), (rand(13, 37),)),
    # scans
    "scan_rows": Case(lambda x: (x.cumsum(1), x.cumprod(1), x.cummax(1), x.logcumsumexp(1)), (rand(4, 41),)),
    "scan_columns": Case(lambda x: (x.cumsum(0), x.cummin(0), x.logcumsumexp(0)), (rand(13, 41),)),
    "scan_odd_values": Case(lambda x: (x.cummax(1), x.cummin(1)), (odd(5, 33),)),
    "scan_integers": Case(lambda x: (x.cumsum(0), x.cumprod(1)), (rand(5, 21, dtype=torch.int32),)),
    "scan_narrow": Case(
        lambda x: tuple(x.cumsum(d, dtype=t).float() for d in (0, 1) for t in NARROW), (below(9, 21, 45),)
    ),
    "totals_narrow": Case(
        lambda x: tuple(x.sum(d, dtype=t).float() + x.prod(d, dtype=t) for d in (0, 1) for t in NARROW),
        (below(99, 21, 45),),
    ),
    "scan_then_more": Case(lambda x: x.cumsum(1) * 2 + x, (rand(4, 41),)),
    # operands that lie turned
    "turned": Case(lambda x, y, b: (x.t() * 2 + y) * b.exp(), (odd(83, 70), rand(70, 83), rand(83))),
    "turned_batch": Case(lambda x, y: x.permute(0, 2, 3, 1) + y, (rand(2, 40, 9, 13), rand(2, 9, 13, 40))),
    "turned_twice": Case(lambda x, y: x.t().relu() - y.t() + x.t()[3, 5], (rand(64, 96), odd(64, 96))),
    "turned_masked": Case(lambda x, y: F.pad(x.t(), (0, 3)) + y, (rand(80, 70), rand(70, 83))),
    "turned_dynamic": Case(lambda x, y: x.t() + y, (rand(83, 70), rand(70, 83)), dynamic=True),
    **{
        f"turned_{dtype}": Case(
            lambda x, y, z: torch.where(x.t() > 0, x.t(), y) + z.t(),
            (rand(65, 70, dtype=dtype), rand(70, 65, dtype=dtype), odd(65, 70)),
        )
        for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool)
    },
    # merged dims of which each fills vectors, or several elements of which one is read for
    **{
        f"merged_{n}": Case(lambda x: x.transpose(1, 2).flatten(2) * 2, (rand(2, 5, 6, n),))
        for n in (8, 12, 16, 24, 32, 48, 64)
    },
    "merged_dynamic": Case(lambda x: x.transpose(1, 2).flatten(2) * 2, (rand(2, 5, 6, 64),), dynamic=True),
    "merged_padded": Case(lambda x: F.pad(x.transpose(1, 2).flatten(2), (3, 2)), (rand(2, 5, 6, 32),)),
    "merged_turned": Case(lambda x, y: x.permute(0, 2, 3, 1).flatten(2) + y, (rand(2, 64, 7, 5), rand(2, 7, 320))),
    **{
        f"groups_of_{n}": Case(
            lambda x, s: x * s[..., None].expand(-1, -1, x.shape[1] // s.shape[1]).flatten(1),
            (rand(40, 5 * n), rand(40, 5)),
        )
        for n in (2, 3, 4, 8, 16, 24, 32)
    },
    "groups_bf16": Case(
        lambda x, s: x * s[..., None].expand(-1, -1, 8).flatten(1),
        (rand(40, 96, dtype=torch.bfloat16), rand(40, 12, dtype=torch.bfloat16)),
    ),
    "groups_float64": Case(
        lambda x, s: (x * s[..., None].expand(-1, -1, 8).flatten(1)).sum(1),
        (rand(40, 88, dtype=torch.float64), rand(40, 11, dtype=torch.float64)),
    ),
    "groups_padded": Case(
        lambda x, s: x * F.pad(s[..., None].expand(-1, -1, 8).flatten(1), (4, 4)), (rand(9, 96), rand(9, 11))
    ),
    # positions known at run time
    "gather": Case(lambda x, i: x.gather(1, i) * 2, (rand(5, 21), below(21, 5, 30))),
    "embedding": Case(lambda w, i: F.embedding(i, w) + 1, (rand(17, 40), below(17, 3, 4))),
    "index_negative": Case(
        lambda x, i, j: (x[i], x[:, j], x[i - 9, j - 5]), (rand(9, 21), below(9, 6), below(5, 6))
    ),
    "index_select": Case(lambda x, i: x.index_select(1, i).relu(), (rand(5, 21), below(21, 33))),
    "index_mask": Case(lambda x, m: torch.where(m[None], x, 0.0), (rand(5, 21), rand(21) > 0)),
    # scatters
    "index_add": Case(lambda x, i, y: x.index_add(0, i, y), (rand(9, 21), below(9, 30), rand(30, 21))),
    "index_put_add": Case(
        lambda x, i, y: x.index_put((i,), y, accumulate=True), (rand(30), below(30, 90), rand(90))
    ),
    "index_put": Case(
        lambda x, i, y: x.index_put((i,), y), (rand(9, 20), torch.tensor([3, 1, 8]), rand(3, 20))
    ),
    "scatter": Case(
        lambda x, i, y: x.scatter(1, i, y), (rand(5, 21), torch.arange(20).flip(0).expand(5, 20), rand(5, 20))
    ),
    "scatter_add": Case(lambda x, i, y: x.scatter_add(1, i, y), (rand(5, 21), below(21, 5, 40), rand(5, 40))),
    "scatter_reduce": Case(
        lambda x, i, y: (x.scatter_reduce(0, i, y, "amax"), x.scatter_reduce(0, i, y, "prod")),
        (rand(9, 21), below(9, 12, 21), rand(12, 21)),
    ),
    "scatter_integers": Case(
        lambda x, i, y: x.scatter_add(0, i, y),
        (rand(19, dtype=torch.int64), below(19, 60), rand(60, dtype=torch.int64)),
    ),
    "scatter_bf16": Case(
        lambda x, i, y: x.index_add(0, i, y),
        (rand(9, 20, dtype=torch.bfloat16), torch.arange(6), rand(6, 20, dtype=torch.bfloat16)),
    ),
    "histogram": Case(lambda i: torch.zeros(10).index_add(0, i, torch.ones(40)), (below(10, 40),)),
    "slice_scatter": Case(lambda x, y: torch.slice_scatter(x, y, 1, 2, 10, 2) + 1, (rand(5, 21), rand(5, 4))),
    # joining, masks, windows
    "cat_pad_roll": Case(twisted, (rand(8, 13), rand(8, 9))),
    "cat_of_different_dtypes": Case(
        lambda x, y: torch.cat([x, y]).exp(), (rand(7, 5), rand(4, 5, dtype=torch.float64))
    ),
    "cat_of_rows": Case(lambda x, y, z: F.silu(torch.cat([x, y, z], 1)) + 1, (odd(40, 32), rand(40, 50), rand(40, 7))),
    "cat_of_turned": Case(lambda x, y: torch.cat([x.t(), y.t()], 1) * 2, (rand(32, 200), rand(50, 200))),
    "cat_of_one_row": Case(lambda x, y: torch.cat([x, y, x]) * 2, (rand(700), rand(90))),
    "halves_turned": Case(
        lambda x, c: x * c + torch.cat([-x[:, 32:], x[:, :32]], 1) * c.exp(), (odd(50, 64), rand(50, 64))
    ),
    "sums_of_rows_and_columns": Case(  # read at quotients and remainders of an axis that is reduced
        lambda x, a, b: (x + (a[:, 2:9, None] + b[:, None, 1:10]).flatten(1)).softmax(1), (rand(6, 63), rand(6, 11), rand(6, 11))
    ),
    "stack": Case(lambda x, y: torch.stack([x, y * 2], -1), (rand(7, 15), rand(7, 15))),
    "many_pieces": Case(many_pieces, (rand(3, 2, 4), rand(3, 70, 4))),
    "many_pieces_dynamic": Case(many_pieces, (rand(5, 3, 4), rand(5, 70, 4)), dynamic=True),
    "circular_pad": Case(lambda x: F.pad(x, (1, 2, 3, 1), mode="circular"), (rand(3, 4, 9, 11),)),
    "circular_pad_bf16": Case(
        lambda x: F.pad(x, (1, 2, 3, 1), mode="circular"), (rand(3, 4, 9, 37, dtype=torch.bfloat16),)
    ),
    "circular_pad_3d": Case(lambda x: F.pad(x, (1, 2, 3, 1, 2, 2), mode="circular"), (rand(2, 3, 4, 5, 9),)),
    "overwritten_bf16": Case(overwritten, (rand(5, 6, 40, dtype=torch.bfloat16), rand(5, 3, 40, dtype=torch.bfloat16))),
    "overwritten_u8": Case(overwritten, (rand(5, 6, 40, dtype=torch.uint8), rand(5, 3, 40, dtype=torch.uint8))),
    "padded_twice_bf16": Case(
        lambda x: F.pad(F.pad(x, (1, 1, 1, 1)), (1, 1, 1, 1)), (rand(3, 5, dtype=torch.bfloat16),)
    ),
    "looked_up_and_padded_bf16": Case(
        looked_up_and_padded,
        (rand(50, 16, dtype=torch.bfloat16), rand(40, 1, dtype=torch.bool), below(50, 40)),
    ),
    "reflect_pad": Case(lambda x: F.pad(x, (2, 3), mode="reflect"), (rand(3, 4, 9),)),
    "triangle": Case(lambda x: torch.triu(x, 1) + torch.arange(19), (rand(17, 19),)),
    "max_pool": Case(lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), (rand(2, 3, 11, 13),)),
    "avg_pool": Case(lambda x: F.avg_pool2d(x, 3, 2, 1), (rand(2, 3, 11, 13),)),
    "upsample": Case(lambda x: F.interpolate(x, scale_factor=2, mode="nearest"), (rand(2, 3, 5, 7),)),
    "rotary": Case(
        lambda x, c, s: x * c + torch.cat([-x[..., 16:], x[..., :16]], -1) * s,
        (rand(2, 3, 5, 32), rand(5, 32), rand(5, 32)),
    ),
    # symbolic sizes
    "dynamic_pointwise": Case(
        lambda x, y: (x + y).relu() * x.shape[0], (rand(5, 37), rand(5, 37)), dynamic=True
    ),
    "dynamic_rows": Case(lambda x: (x.softmax(1), x.sum(1), x.argmax(1)), (rand(5, 37),), dynamic=True),
    "dynamic_columns": Case(
        lambda x: (x.mean(0), x.amax(0), torch.var_mean(x, 0)), (rand(9, 37),), dynamic=True
    ),
    "dynamic_cat": Case(lambda x, y: torch.cat([x, y], 1).flip(1), (rand(5, 13), rand(5, 21)), dynamic=True),
    "dynamic_layer_norm": Case(lambda x: F.layer_norm(x, x.shape[1:]), (rand(5, 37),), dynamic=True),
    "dynamic_scan": Case(lambda x: x.cumsum(1), (rand(5, 37),), dynamic=True),
    "dynamic_gather": Case(lambda x, i: x[i] + 1, (rand(9, 37), below(9, 14)), dynamic=True),
    "dynamic_scatter": Case(
        lambda x, i, y: x.index_add(0, i, y), (rand(9, 21), below(9, 30), rand(30, 21)), dynamic=True
    ),
    "dynamic_reshape": Case(lambda x: x.reshape(-1, 2).t().contiguous() * 2, (rand(6, 10),), dynamic=True),
    # what training makes
    "layer_norm_backward": Case(
        lambda x, w, b: F.layer_norm(x, (40,), w, b) ** 2, (rand(6, 40), rand(40), rand(40)), train=True
    ),
    "softmax_backward": Case(lambda x: x.softmax(1) ** 2, (rand(6, 40),), train=True),
    "embedding_backward": Case(lambda w, i: F.embedding(i, w) ** 2, (rand(11, 20), below(11, 7)), train=True),
    "batch_norm_backward": Case(
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True) ** 2,
        (rand(4, 5, 6, 6), rand(5), rand(5)),
        train=True,
    ),
    "max_pool_backward": Case(lambda x: F.max_pool2d(x, 2) ** 2, (rand(2, 3, 8, 8),), train=True),
}


def roles(case: Case) -> tuple[str, ...]:
    return ("forward", "backward") if case.train else ("inference",)


@functools.cache
def programs(name: str) -> list[tuple[Program, list[Any], list[Any]]]:
    """(program, its inputs, what the traced graph gives for them) for each graph of a case."""
    case = CASES[name]
    with threads(2):
        graphs = traced(case.fn, *case.inputs, dynamic=case.dynamic, train=case.train)
        found = []
        for role in roles(case):
            given = graphs[role].meta["given"]
            with torch.no_grad():
                expected = torch.fx.Interpreter(graphs[role]).run(
                    *(g.clone() if isinstance(g, torch.Tensor) else g for g in given)
                )
            found.append((program_of(graphs[role]), given, list(expected)))
        return found


@functools.cache
def interpreted(
    name: str,
) -> list[tuple[Launch, dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, int]]]:
    """Each launch of a case with its memory before (guarded) and after, and the sizes."""
    found = []
    for program, given, _ in programs(name):
        memory = Memory(program, given)
        for launch in program.launches:
            state = memory.bind(launch)
            before = guarded(state)
            run_kernel(launch.kernel, state, memory.sizes)
            found.append((launch, before, {n: t.clone() for n, t in state.items()}, dict(memory.sizes)))
    return found


def function_name(launch: Launch) -> str:
    return f"{launch.kernel.name}_{launch.kernel.digest}"


def emitted(launch: Launch, lanes: int) -> Emitted:
    name = function_name(launch)
    return Emitted(name, codegen.emit(launch.kernel, name, lanes))


def unit_of(kernels: list[Emitted]) -> Unit:
    return Unit(kernels[0].name, "\n\n".join([PRELUDE, *(k.text for k in kernels), ""]), effort="exact")


@functools.cache
def addresses(isa: str) -> dict[str, int]:
    """The address of each kernel of every case that can be traced and emitted, 16 to a unit, or all that differ
    in sizes only."""
    config = Config.make(None, {"isa": isa})
    lanes, texts = toolchain.lanes(config), {}
    for name in CASES:
        try:
            found = {function_name(x): emitted(x, lanes) for p, _, _ in programs(name) for x in p.launches}
        except Exception:  # shows in the case's own test
            continue
        texts.update(found)
    names, shared = list(texts), outline(list(texts.values()))
    units = [unit_of(shared[k : k + 16]) for k in range(0, len(shared), 16)]
    try:
        library = build(units, config)
    except BuildError:
        return {}  # shows in the cases' own tests, which build one by one
    return {n: library.address(n) for n in names}


def call(launch: Launch, isa: str, memory: dict[str, torch.Tensor], sizes: dict[str, int]) -> int:
    """Run a generated kernel; returns the number of the failed index check, or 0."""
    name = function_name(launch)
    address = addresses(isa).get(name)
    if address is None:
        config = Config.make(None, {"isa": isa})
        address = build([unit_of(outline([emitted(launch, toolchain.lanes(config))]))], config).address(name)
    error = ctypes.c_int32(0)
    args: list[Any] = [ctypes.c_void_p(memory[p.name].data_ptr()) for p in launch.kernel.params]
    args += [ctypes.c_int64(sizes[v.name]) for v in launch.kernel.sizes]
    if codegen.has_checks(launch.kernel):
        args.append(ctypes.byref(error))
    ctypes.CFUNCTYPE(None, *(type(a) if not hasattr(a, "_obj") else ctypes.c_void_p for a in args))(address)(
        *(ctypes.cast(a, ctypes.c_void_p) if hasattr(a, "_obj") else a for a in args)
    )
    return error.value


def copies(memory: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies; buffers that were one stay one."""
    made = {id(t): t.clone() for t in memory.values()}
    return {name: made[id(t)] for name, t in memory.items()}


def guarded(memory: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies with a guard behind each; buffers that were one stay one."""
    made: dict[int, torch.Tensor] = {}
    for t in memory.values():
        if id(t) not in made:
            made[id(t)] = torch.cat([t, torch.full((GUARD,), 7, dtype=t.dtype)])
    return {name: made[id(t)] for name, t in memory.items()}


def close(actual: torch.Tensor, expected: torch.Tensor, what: str, intermediate: bool = False) -> None:
    """Rounding of the last place per operation is allowed: kernels may sum in another order.

    intermediate: eager also rounds every intermediate result to a low precision, which kernels keep in float32.
    """
    rtol, atol = {
        torch.bfloat16: (1.6e-2, 1e-5),
        torch.float16: (2e-3, 1e-5),
        torch.float32: (2e-5, 2e-5),
        torch.float64: (1e-10, 1e-10),
    }.get(expected.dtype, (0, 0))
    if intermediate and expected.dtype in (torch.bfloat16, torch.float16):
        atol = 5 * rtol
    torch.testing.assert_close(
        actual, expected, rtol=rtol, atol=atol, equal_nan=True, msg=lambda text: f"{what}\n{text}"
    )


def supported(isa: str) -> bool:
    try:
        return toolchain.host_isa(Config.make(None, {"isa": isa})) == isa
    except OptionError:
        return False


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DICP_ISA", raising=False)


@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernels_agree_with_eager(name: str) -> None:
    for program, given, expected in programs(name):
        assert not program.externs and not program.library_calls
        memory = Memory(program, given)
        for launch in program.launches:
            run_kernel(launch.kernel, memory.bind(launch), memory.sizes)
        for k, (mine, eager) in enumerate(zip(memory.outputs(given), expected, strict=True)):
            if isinstance(eager, torch.Tensor):
                close(mine, eager, f"output {k}", intermediate=True)
            else:
                assert mine == eager


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", CASES)
def test_generated_kernels_agree_with_interpreted(name: str, isa: str) -> None:
    if not supported(isa):
        pytest.skip(f"this machine has no {isa}")
    for launch, before, after, sizes in interpreted(name):
        check_launch(launch, functools.partial(call, launch, isa, sizes=sizes), before, after)


def check_launch(
    launch: Launch,
    run: Callable[[dict[str, torch.Tensor]], int],
    before: dict[str, torch.Tensor],
    after: dict[str, torch.Tensor],
) -> None:
    """`run(memory)` calls the kernel, and gives the number of the check that failed, or 0."""
    mine = copies(before)
    assert run(mine) == 0
    for p in launch.kernel.params:
        close(mine[p.name][:-GUARD], after[p.name], f"{p.name} of {launch.kernel.name}")
        assert torch.equal(mine[p.name][-GUARD:], before[p.name][-GUARD:]), (
            f"{launch.kernel.name} wrote behind {p.name}"
        )
    bare = {id(t): t[:-GUARD] for t in before.values()}
    for at_end in (False, True):
        memory = walled({name: bare[id(t)] for name, t in before.items()}, at_end)
        assert run(memory) == 0
    for out, sources in launch.in_place.items():
        for source in sources:
            a, b = before[out], before[source]
            if a is b or a.numel() != b.numel() or a.dtype.itemsize != b.dtype.itemsize:
                continue
            shared = copies(before)
            shared[out] = shared[source].view(a.dtype)
            assert run(shared) == 0
            for name in (p.name for p in launch.kernel.params if p.written and p.name != source):
                why = f"{name} of {launch.kernel.name}, {out} in place of {source}"
                close(shared[name][:-GUARD], after[name], why)


@pytest.mark.parametrize(("channels", "vectors"), [(3, "37"), (64, "64")])
def test_vectors_are_along_an_axis_that_fills_them(channels: int, vectors: str) -> None:
    """Three channels that lie together are written one by one, along rows that are read together."""
    x = rand(2, channels, 5, 37)
    graphs = traced(lambda x: (x * 2).contiguous(memory_format=torch.channels_last), x)
    (launch,) = program_of(graphs["inference"]).launches
    shape = loops.choose_shape(launch.kernel, 16)
    assert shape.vector is not None and str(shape.vector.size) == vectors


TURNED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int]] = {  # and how many tiles; results lie as x does
    "one operand": (lambda x, y: x + y.t(), (rand(300, 64), rand(64, 300)), 1),
    "one of three": (lambda x, y, z: x + y.t() * z, (rand(300, 64), rand(64, 300), rand(300, 64)), 1),
    "two of three": (lambda x, y, z: x + y.t() * z.t(), (rand(300, 64), rand(64, 300), rand(64, 300)), 2),
    "none": (lambda x, y: x + y, (rand(300, 64), rand(300, 64)), 0),
    "rows too short": (lambda x, y: x + y.t(), (rand(300, 9), rand(9, 300)), 0),
    "columns too short": (lambda x, y: x + y.t(), (rand(9, 300), rand(300, 9)), 0),
    "blocks too few": (lambda x, y: x + y.t(), (rand(20, 300), rand(300, 20)), 0),
    "in rows behind a mask": (lambda x, y: x + F.pad(y.t(), (0, 0, 1, 0)), (rand(300, 64), rand(64, 299)), 1),
    "in the range of a mask": (lambda x, y: x + F.pad(y.t(), (1, 0)), (rand(300, 64), rand(63, 300)), 1),
}


@pytest.mark.parametrize("case", TURNED)
def test_operands_that_lie_turned_are_read_in_tiles(case: str) -> None:
    fn, inputs, count = TURNED[case]
    with threads(2):
        (launch,) = program_of(traced(fn, *inputs)["inference"]).launches
        assert codegen.emit(launch.kernel, "f", 16).count(".load(") == count


@pytest.mark.parametrize("case", ["overwritten_bf16", "circular_pad_bf16"])
def test_copies_of_a_narrow_dtype_are_of_bits(case: str) -> None:
    """Without the conversion there and back, though each row is of one tensor or another, or zero."""
    launch = programs(case)[0][0].launches[0]
    code = re.sub(r"//.*", "", codegen.emit(launch.kernel, "f", 16))
    assert "= load_bits(" in code and "= load(" not in code and "vf32 v" not in code


def test_rows_are_kept_for_each_phase_that_computes_them_first() -> None:
    """What is summed up before the maximum is known, and the exponentials behind it."""
    inputs = [rand(8, 100) for _ in range(3)]
    (launch,) = program_of(traced(lambda x, y, z: (x * y + z).softmax(1), *inputs)["inference"]).launches
    assert codegen.emit(launch.kernel, "f", 16).count("alignas(64) float row") == 2


REDUCTIONS: dict[str, tuple[Callable[..., Any], str, str]] = {  # of x: [100, 1003] and v: [100]; the loops, vectors along
    "rows": (lambda x, v: x.sum(1), "rows", "1003"),
    "rows in two moments": (lambda x, v: torch.var_mean(x, 1), "rows", "1003"),
    "columns": (lambda x, v: x.sum(0), "columns", "1003"),
    "rows times a column": (lambda x, v: (x * v[:, None]).amax(1), "rows", "1003"),
    "columns times a row": (lambda x, v: (x * v[:, None]).amax(0), "columns", "1003"),
    "rows, written again": (lambda x, v: (x - (m := x.mean(1, keepdim=True)), m), "rows", "1003"),
    "a product": (lambda x, v: (x[:, :100, None] + x[:100]).amax(1), "columns", "1003"),
    "columns, read and written, times turned ones": (
        lambda x, v: (p := x * x.reshape(1003, 100).t()) - p.sum(0),
        "columns",
        "1003",
    ),
}


@pytest.mark.parametrize("case", REDUCTIONS)
def test_reductions_are_vectors_along_what_lies_together(case: str) -> None:
    """Of what is read at each point, however many results are stored once per row."""
    fn, kind, size = REDUCTIONS[case]
    graphs = traced(fn, rand(100, 1003), rand(100))
    shape = loops.choose_shape(program_of(graphs["inference"]).launches[0].kernel, 16)
    assert shape.vector is not None and (shape.kind, str(shape.vector.size)) == (kind, size)


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 31, 33, 64, 100])
def test_one_dynamic_kernel_serves_every_size(n: int) -> None:
    """The kernels compiled for one size, run at others."""
    program, given, _ = programs("dynamic_rows")[0]
    x = rand(3, n)
    inputs = [x if isinstance(g, torch.Tensor) else {5: 3, 37: n}[g] for g in given]
    memory = Memory(program, inputs)
    for launch in program.launches:
        state = memory.bind(launch)
        before = guarded(state)
        run_kernel(launch.kernel, state, memory.sizes)
        run = functools.partial(call, launch, "portable", sizes=memory.sizes)
        check_launch(launch, run, before, state)
    softmax, total, best = memory.outputs(inputs)
    close(softmax, x.softmax(1), "softmax")
    close(total, x.sum(1), "sum")
    assert torch.equal(best, x.argmax(1))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("n", [3, 70_001, 2_200_001])  # the last is streamed past the caches
def test_memory_is_cleared_to_its_last_byte_and_no_further(n: int, isa: str) -> None:
    if not supported(isa):
        pytest.skip(f"this machine has no {isa}")
    program = program_of(
        traced(lambda i: torch.zeros(n).index_add(0, i, torch.ones(2)), below(2, 2))["inference"]
    )
    launch, config = program.launches[0], Config.make(None, {"isa": isa})
    unit = unit_of(outline([emitted(launch, toolchain.lanes(config))]))
    assert "zeros(" in unit.source
    clear = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(build([unit], config).address(function_name(launch)))
    for ahead in (0, 1, 7):  # elements from an address that a cache line's size divides
        memory = torch.full((n + 2 * GUARD,), 1.1)  # no byte of it is 0
        first = GUARD - memory.data_ptr() % 64 // 4 + ahead
        with threads(2):
            clear(memory.data_ptr() + 4 * first)
        assert memory[first : first + n].count_nonzero() == 0
        assert memory.count_nonzero() == 2 * GUARD


@pytest.mark.parametrize("isa", ISAS)
def test_index_out_of_range_is_reported_not_read(isa: str) -> None:
    if not supported(isa):
        pytest.skip(f"this machine has no {isa}")
    program, given, _ = programs("embedding")[0]
    (launch,) = program.launches
    for bad in (17, -1, 1 << 40):
        wrong = [g.clone() for g in given]
        next(g for g in wrong if g.dtype == torch.int64)[1, 2] = bad
        memory = Memory(program, wrong)
        state = memory.bind(launch)
        assert call(launch, isa, guarded(state), memory.sizes) == 1
        with pytest.raises(IndexError):
            run_kernel(launch.kernel, state, memory.sizes)

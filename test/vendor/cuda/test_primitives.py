"""Every scalar primitive: interpreted it does what ir/interpret.py says, and it compiles."""

from __future__ import annotations

import pytest
import torch
from kernels import TARGETS, compile_everywhere, load, pointwise, reference, run

from dicp.config import Config
from dicp.ir import expr as ex
from dicp.ir import index as ix
from dicp.ir.expr import Expr
from dicp.ir.index import Var
from dicp.vendor.cuda_graph import codegen, device, emulate

N = 1000
FLOATS = (torch.float32, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
FLOAT_ONLY = ex.EXPENSIVE - {"pow", "remainder", "fmod"} | {
    "sqrt",
    "rsqrt",
    "reciprocal",
    "div",
    "copysign",
    "nextafter",
}
INTEGER_ONLY = {"bnot", "band", "bor", "bxor", "shl", "shr", "gcd", "lcm"}
LOGICAL = {"land", "lor", "lxor", "lnot"}
ON_BOOL = [
    *sorted(LOGICAL),
    "add",
    "mul",
    "minimum",
    "maximum",
    "lt",
    "le",
    "gt",
    "ge",
    "eq",
    "ne",
    "band",
    "where",
]
NONZERO = {"div_trunc", "div_floor", "remainder", "fmod", "lcm"}
ARITY = dict.fromkeys(ex.UNARY, 1) | dict.fromkeys(ex.BINARY, 2) | dict.fromkeys(ex.TERNARY, 3)


def cases() -> list[tuple[str, torch.dtype]]:
    plain = sorted(set(ARITY) - LOGICAL)
    out = [(op, d) for d in FLOATS for op in plain if op not in INTEGER_ONLY]
    out += [(op, d) for d in INTEGERS for op in plain if op not in FLOAT_ONLY | {"fma"}]
    return out + [(op, torch.bool) for op in ON_BOOL]


def numbers(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Numbers of all sizes, with zeros, infinities, NaN and the extremes among them."""
    g = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(N, generator=g) < 0.5
    pick = torch.rand(N, generator=g) < 0.2
    if dtype.is_floating_point:
        special = torch.tensor(
            [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1.0, -1.0, 0.5, -2.5, 2.0], dtype=dtype
        )
        usual = torch.randn(N, generator=g, dtype=dtype) * 3
        return torch.where(pick, special[torch.randint(0, len(special), (N,), generator=g)], usual)
    info = torch.iinfo(dtype)
    small = torch.randint(max(info.min, -20), 20, (N,), generator=g, dtype=dtype)
    return torch.where(pick, torch.randint(info.min, info.max, (N,), generator=g, dtype=dtype), small)


def kernel_of(op: str, dtype: torch.dtype):  # type: ignore[no-untyped-def]
    i = ix.of(Var("i", N))
    dtypes = {f"x{k}": torch.bool if op == "where" and k == 0 else dtype for k in range(ARITY[op])}
    args = tuple(load(name, i, d) for name, d in dtypes.items())
    return pointwise(Expr(op, args, torch.bool if op in ex.TO_BOOL else dtype), N, dtypes)


@pytest.fixture(scope="module")
def config(cuda_cache: str) -> Config:
    return Config.make(options={"cache_dir": cuda_cache})


@pytest.mark.parametrize("op, dtype", cases(), ids=lambda v: str(v).removeprefix("torch."))
def test_interpreted_primitive_means_what_the_ir_says(op: str, dtype: torch.dtype, config: Config) -> None:
    kernel = kernel_of(op, dtype)
    inputs = [numbers(p.dtype, k) for k, p in enumerate(kernel.params[:-1])]
    if not dtype.is_floating_point and dtype != torch.bool:
        if op in NONZERO:
            inputs[1] = torch.where(inputs[1] == 0, 1, inputs[1]).to(dtype)
            lowest = torch.iinfo(dtype).min
            inputs[0] = torch.where(inputs[0] == lowest, 1, inputs[0]).to(dtype)
        if op in ("pow", "shl", "shr"):  # some shifts are too long
            most = dtype.itemsize * 8 * (1 if op == "pow" else 2)
            inputs[1] = (inputs[1] % min(most, torch.iinfo(dtype).max)).abs().to(dtype)
    out = torch.zeros(N, dtype=kernel.params[-1].dtype)
    got, want = run(kernel, [*inputs, out], (), config)[-1], reference(kernel, [*inputs, out], ())[-1]
    loose = {"rtol": 2e-5, "atol": 2e-3} if op == "digamma" and dtype == torch.float32 else {}
    torch.testing.assert_close(got, want, equal_nan=True, **loose)
    if dtype.is_floating_point and op in ("neg", "abs", "mul", "copysign", "trunc", "round_even"):
        number = ~want.isnan()
        assert torch.equal(torch.signbit(got)[number], torch.signbit(want)[number])


def test_every_primitive_compiles_for_a_gpu(config: Config) -> None:
    """One architecture here; the models' kernels go through all three."""
    chosen = [c for c in cases() if c[1] in (torch.float32, torch.int64)]
    sources = [codegen.emit(kernel_of(op, dtype)) for op, dtype in chosen]
    assert compile_everywhere(sources, config, TARGETS[1:2]) == len(chosen)


@pytest.mark.slow
def test_every_primitive_compiles_for_every_dtype_and_gpu(config: Config) -> None:
    sources = [codegen.emit(kernel_of(op, dtype)) for op, dtype in cases()]
    assert compile_everywhere(sources, config) == 3 * len(sources)


def test_interpreter_has_every_device_function() -> None:
    names = {n for n, f in vars(device).items() if hasattr(f, "fn")}
    assert names <= set(vars(emulate.namespace()))

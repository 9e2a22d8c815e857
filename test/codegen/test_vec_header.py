"""The header that generated CPU kernels include: every function at every lane count this machine can run."""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import dicp
from dicp.config import Config
from dicp.vendor.cpu_graph import toolchain

INCLUDE = Path(dicp.__file__).parent / "vendor" / "cpu_graph" / "include"
TORCH_LIB = Path(torch.__file__).parent / "lib"
FLAGS = "-std=c++17 -O2 -fopenmp -fno-math-errno -fno-trapping-math -fwrapv -Wall -Wextra".split()
ISA_FLAGS = {
    16: "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c".split(),
    8: "-mavx2 -mfma -mf16c".split(),
    4: [],
}
COMPILER, _ = toolchain.find(Config.make())

UNARY = """abs neg sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh
asinh acosh atanh erf erfc lgamma digamma floor ceil trunc round sigmoid sign""".split()
BINARY = """pow atan2 fmod hypot copysign nextafter maximum minimum fmin fmax
remainder div_floor div_trunc""".split()
TESTS = "isnan isinf isfinite signbit".split()
COMPARE = "lt le gt ge eq ne".split()
INT_UNARY = "abs neg sign bnot".split()
DTYPE = {32: torch.int32, 64: torch.int64}
INT_BINARY = "div_trunc div_floor remainder shl shr gcd lcm maximum minimum band bor bxor".split()
STORAGE = "float double bf16 half int8_t uint8_t int16_t int32_t int64_t bool".split()
COMPUTE = "float double int32_t int64_t bool".split()
NUMPY = {f"{t}_t": getattr(np, t) for t in ("int8", "uint8", "int16", "int32", "int64")}
NUMPY |= {"float": np.float32, "double": np.float64, "bool": np.bool_, "bf16": np.uint16, "half": np.uint16}
REPEATS = (2, 4, 8, 16)  # or as many as a vector has
LOW = {"bf16": torch.bfloat16, "half": torch.float16}


def source() -> str:
    """One translation unit: a kernel `<function>_<type>` and a scalar twin `.._one` of each thing tested."""
    out = [PRELUDE]
    out += [f"UNARY({n}, {t}, {t})" for t in ("float", "double") for n in UNARY]
    out += [f"UNARY({n}, {t}, bool)" for t in ("float", "double") for n in TESTS]
    out += [f"BINARY({n}, {t}, {t})" for t in ("float", "double") for n in BINARY]
    out += [f"BINARY({n}, {t}, bool)" for t in COMPUTE for n in COMPARE]
    out += [f"BINARY({n}, bool, bool)" for n in ("land", "lor", "lxor")]
    out += ["UNARY(lnot, bool, bool)"]
    out += [f"UNARY({n}, {t}, {t})" for t in ("int32_t", "int64_t") for n in INT_UNARY]
    out += [f"BINARY({n}, {t}, {t})" for t in ("int32_t", "int64_t") for n in INT_BINARY]
    out += [f"MEMORY({t})" for t in STORAGE]
    out += [f"REPEATED({t}, {times})" for t in STORAGE for times in REPEATS]
    out += [f"ADD({t})" for t in STORAGE if t != "bool"]
    out += [f"CAST({a}, {b})" for a in COMPUTE for b in COMPUTE]
    out += [f"WRAP({t})" for t in ("int8_t", "uint8_t", "int16_t")]
    out += [f"HORIZONTAL({t})" for t in ("float", "double", "int32_t", "int64_t")]
    return "\n".join(out)


PRELUDE = r"""
#include "dicp_vec.h"
using namespace dicp;

template <class F> DICP_INLINE void loop(int64_t n, F f) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) f(i, Full{});
  if (i < n) f(i, Lanes{(int)(n - i)});
}
template <class F> DICP_INLINE void loop_one(int64_t n, F f) {
  for (int64_t i = 0; i < n; ++i) f(i, One{});
}
#define KERNEL(name, args, ...)                                                                  \
  extern "C" void name args { loop(n, [&](int64_t i, auto lanes) { __VA_ARGS__; }); }            \
  extern "C" void name##_one args { loop_one(n, [&](int64_t i, auto lanes) { __VA_ARGS__; }); }
#define MAP(name, T, R, f)                                                                       \
  KERNEL(name, (const T* x, R* out, int64_t n), store(out + i, f(load(x + i, lanes)), lanes))
#define UNARY(f, T, R) MAP(f##_##T, T, R, f)
#define BINARY(f, T, R)                                                                          \
  KERNEL(f##_##T, (const T* x, const T* y, R* out, int64_t n),                                   \
         store(out + i, f(load(x + i, lanes), load(y + i, lanes)), lanes))
#define CAST(A, B) MAP(cast_##A##_##B, A, B, cast<B>)
#define WRAP(T) MAP(wrap_##T, int32_t, int32_t, wrap<T>)
#define MEMORY(T)                                                                                \
  MAP(copy_##T, T, T, )                                                                          \
  KERNEL(masked_##T, (const T* x, const bool* m, T* out, int64_t n),                             \
         auto k = load(m + i, lanes); store(out + i, load(x + i, lanes, k), lanes))              \
  KERNEL(masked_store_##T, (const T* x, const bool* m, T* out, int64_t n),                       \
         store(out + i, load(x + i, lanes), lanes, load(m + i, lanes)))                          \
  extern "C" void zero_fill_##T(const T* x, vec<T>* out, int64_t n) { *out = load(x, Lanes{(int)n}); } \
  extern "C" void strided_##T(const T* x, int64_t stride, const bool* m, T* out, int64_t n) {    \
    loop(n, [&](int64_t i, auto lanes) {                                                         \
      auto k = load(m + i, lanes);                                                               \
      store(out + i, load_strided(x + i * stride, stride, lanes), lanes);                        \
      store_strided(out + n + i * 2, 2, load_strided(x + i * stride, stride, lanes, k), lanes);  \
    });                                                                                          \
  }                                                                                              \
  extern "C" void permute_##T(const T* x, const int64_t* idx, const bool* m, T* out, int64_t n) { \
    loop(n, [&](int64_t i, auto lanes) {                                                         \
      auto at = load(idx + i, lanes);                                                            \
      auto k = load(m + i, lanes);                                                               \
      store(out + i, gather(x, at, lanes), lanes);                                               \
      store(out + n + i, gather(x, cast<vi32>(at), lanes, k), lanes);                            \
      scatter(out + 2 * n, at, load(x + i, lanes), lanes);                                       \
      scatter(out + 3 * n, cast<vi32>(at), load(x + i, lanes), lanes, k);                        \
    });                                                                                          \
  }
#define REPEATED(T, most)                                                                        \
  extern "C" void repeated_##T##_##most(const T* x, const bool* m, T* out, int64_t n) {          \
    constexpr int times = most < LANES ? most : LANES;                                           \
    loop(n, [&](int64_t i, auto lanes) {                                                         \
      store(out + i, load_repeated<times>(x + i / times, lanes), lanes);                         \
      store(out + n + i, load_repeated<times>(x + i / times, lanes, load(m + i, lanes)), lanes); \
    });                                                                                          \
  }
#define ADD(T)                                                                                   \
  extern "C" void scatter_add_##T(const T* x, const int64_t* idx, const bool* m, T* out, int64_t n) { \
    loop(n, [&](int64_t i, auto lanes) {                                                         \
      scatter_add(out, load(idx + i, lanes), load(x + i, lanes), lanes, load(m + i, lanes));     \
    });                                                                                          \
  }                                                                                              \
  extern "C" void atomic_add_##T(const T* x, T* out, int64_t n) {                                \
    _Pragma("omp parallel for num_threads(2)")                                                   \
    for (int64_t i = 0; i < n; i += LANES)                                                       \
      scatter_atomic_add(out, splat<vi64>(0), load(x, Full{}), Full{});                          \
  }
#define HORIZONTAL(T)                                                                            \
  extern "C" void horizontal_##T(const T* x, const int64_t* idx, T* out, int64_t* arg) {         \
    auto v = load(x, Full{});                                                                    \
    auto at = load(idx, Full{});                                                                 \
    out[0] = hsum(v), out[1] = hprod(v), out[2] = hmax(v), out[3] = hmin(v);                     \
    arg[0] = hargmax(v, at), arg[1] = hargmin(v, at);                                            \
  }                                                                                              \
  extern "C" void tail_sum_##T(const T* x, T* out, int64_t n) {                                  \
    Lanes tail{(int)n};                                                                          \
    *out = hsum(blend(tail, load(x, tail) + splat<vec<T>>(1), 0));                               \
  }
KERNEL(where_float, (const bool* m, const float* x, float* out, int64_t n),
       store(out + i, where(load(m + i, lanes), load(x + i, lanes), -1.0f), lanes))
KERNEL(where_int64_t, (const bool* m, const int64_t* x, int64_t* out, int64_t n),
       store(out + i, where(load(m + i, lanes), load(x + i, lanes), -1), lanes))
KERNEL(fma_float, (const float* x, const float* y, float* out, int64_t n),
       store(out + i, fma(load(x + i, lanes), load(y + i, lanes), -1.0f), lanes))
MAP(round_bf16, float, float, dicp::round_bf16)
MAP(round_half, float, float, dicp::round_half)
MAP(to_bf16, float, bf16, )
MAP(to_half, float, half, )
MAP(from_bf16, bf16, float, )
MAP(from_half, half, float, )
extern "C" void iota_int64_t(int64_t* out, int64_t n) {
  loop(n, [&](int64_t i, auto lanes) { store(out + i, iota((1LL << 40) + i), lanes); });
}
extern "C" void small_parts(int32_t* quotient, int32_t* remainder, int64_t by, int64_t n) {
  loop(n, [&](int64_t i, auto lanes) {
    store(quotient + i, small_quotient(iota32((int32_t)i), (int32_t)by), lanes);
    store(remainder + i, small_remainder(iota32((int32_t)i), (int32_t)by), lanes);
  });
}
extern "C" void iota_int32_t(int32_t* out, int64_t n) {
  loop(n, [&](int64_t i, auto lanes) { store(out + i, iota32((int32_t)i - 3), lanes); });
}
extern "C" int any_all(const bool* x) {
  vbool m = load(x, Full{});
  return hany(m) + 2 * hall(m);
}
extern "C" void mixed(const int8_t* x, const double* y, half* out, int64_t n) {
  loop(n, [&](int64_t i, auto lanes) {
    vf64 wide = load(y + i, lanes);
    store(out + i, where(lt(wide, 2.0), cast<double>(load(x + i, lanes)) * 2 + wide, 0.5), lanes);
  });
}
"""


def runnable_lanes() -> list[int]:
    """The lane counts whose instructions this processor has."""
    have = toolchain.cpu_flags()
    return [n for n, flags in ISA_FLAGS.items() if all(f[2:] in have for f in flags)]


def build(lanes: int, folder: Path) -> Path:
    """The library of all kernels for one lane count; a warning is an error."""
    cpp, so = folder / f"kernels_{lanes}.cpp", folder / f"kernels_{lanes}.so"
    cpp.write_text(source())
    link = ("-shared", "-fPIC", f"-L{TORCH_LIB}", "-ltorch_cpu", f"-Wl,-rpath,{TORCH_LIB}")
    assert COMPILER is not None
    command = [*COMPILER.command, *FLAGS, "-Werror", *ISA_FLAGS[lanes], f"-DDICP_LANES={lanes}", f"-I{INCLUDE}"]
    done = subprocess.run([*command, str(cpp), "-o", str(so), *link], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:5000]
    return so


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[int, ctypes.CDLL]:
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("vec")
    with ThreadPoolExecutor(2) as pool:
        built = list(pool.map(lambda n: build(n, folder), runnable_lanes()))
    return {n: ctypes.CDLL(str(path)) for n, path in zip(runnable_lanes(), built)}


@pytest.fixture(params=list(ISA_FLAGS))
def lanes(request: pytest.FixtureRequest) -> int:
    if request.param not in runnable_lanes():
        pytest.skip("this processor lacks the instructions")
    return int(request.param)


@pytest.fixture
def lib(libraries: dict[int, ctypes.CDLL], lanes: int) -> ctypes.CDLL:
    return libraries[lanes]


def run(lib: ctypes.CDLL, name: str, *args: np.ndarray | int) -> int:
    """Call a kernel with pointers to the arrays."""
    addresses = [ctypes.c_int64(a if isinstance(a, int) else a.ctypes.data) for a in args]
    return int(getattr(lib, name)(*addresses))


def forms(name: str) -> Iterator[str]:
    """The vector kernel and its scalar twin."""
    yield name
    yield name + "_one"


def floats(t: str, size: int = 4001) -> np.ndarray:
    """Edge values and random ones of every magnitude."""
    rng = np.random.default_rng(0)
    info = np.finfo(NUMPY[t])
    edges = [0.0, -0.0, 1, -1, 0.5, -0.5, 1.5, 2.5, -2.5, 3, np.inf, -np.inf, np.nan, info.max, -info.max]
    least = info.smallest_subnormal
    edges += [info.tiny, -info.tiny, info.tiny / 4, info.eps, least, -least]
    edges += [88.7, 88.8, -87.4, -88, -103, -104, -110, 709.7, 709.9, -745]
    edges += [1e-30, 1e10, -1e10, 0.999999, 9.1, 12]
    wide = rng.standard_normal(size) * np.exp(rng.uniform(-20, 20, size))
    with np.errstate(over="ignore"):
        return np.concatenate([edges, rng.uniform(-12, 12, size), wide]).astype(NUMPY[t])


def ulps(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Distance from the wider reference in units of the last place; 0 where both are one special value."""
    with np.errstate(all="ignore"):
        rounded = want.astype(got.dtype)
        agree = (np.isnan(got) & np.isnan(rounded)) | (got == rounded)
        unit = np.spacing(np.maximum(np.abs(rounded), np.finfo(got.dtype).tiny))
        distance = np.abs(got.astype(np.longdouble) - want.astype(np.longdouble)) / unit
    return np.where(agree, 0, np.where(np.isfinite(distance), distance, np.inf)).astype(float)


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("t", ["float", "double"])
def test_unary(lib: ctypes.CDLL, lanes: int, name: str, t: str) -> None:
    x = floats(t)
    if name == "sigmoid":
        x = x[~(x < -87)]  # below, 1 / (1 + e^-x) underflows sooner than the exact value, as eager does
    want = getattr(torch, name)(torch.from_numpy(x).double()).numpy()
    if t == "double" and name in ("sinh", "cosh"):  # here torch is less exact than what is under test
        with np.errstate(over="ignore"):
            want = getattr(np, name)(x.astype(np.longdouble))
    for form in forms(f"{name}_{t}"):
        got = np.empty_like(x)
        run(lib, form, x, got, len(x))
        if name in ("lgamma", "digamma"):  # no relative accuracy beside their zeros
            tolerance = 2e-6 if t == "float" else 1e-12
            with np.errstate(over="ignore"):
                np.testing.assert_allclose(got, want.astype(x.dtype), rtol=tolerance, atol=1e-6)
            continue
        error = ulps(got, want)
        i = int(error.argmax())
        libm = form.endswith("_one") or lanes == 4
        limit = 2.6 if libm or name in ("sigmoid", "rsqrt", "erfc") else 1.4
        assert error[i] <= (limit if t == "float" else 4), (form, x[i], got[i], want[i])
        zeros = (got == 0) & (want == 0)
        assert (np.signbit(got) == np.signbit(want))[zeros].all(), form


@pytest.mark.parametrize("name", TESTS)
@pytest.mark.parametrize("t", ["float", "double"])
def test_predicates(lib: ctypes.CDLL, name: str, t: str) -> None:
    x = floats(t, 100)
    for form in forms(f"{name}_{t}"):
        got = np.empty(len(x), np.bool_)
        run(lib, form, x, got, len(x))
        assert (got == getattr(np, name)(x)).all(), form


def pairs(x: np.ndarray, edge: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Every pair of the first values, then the rest against a shuffled copy."""
    head, shuffled = x[:edge], np.random.default_rng(1).permutation(x)
    left, right = np.repeat(head, len(head)), np.tile(head, len(head))
    return np.concatenate([left, x]), np.concatenate([right, shuffled])


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("t", ["float", "double"])
def test_binary(lib: ctypes.CDLL, name: str, t: str) -> None:
    x, y = pairs(floats(t, 3000))
    a, b = torch.from_numpy(x), torch.from_numpy(y)
    as_eager: dict[str, Callable[[], torch.Tensor]] = {
        "remainder": lambda: torch.remainder(a, b),
        "div_floor": lambda: torch.div(a, b, rounding_mode="floor"),
        "div_trunc": lambda: torch.div(a, b, rounding_mode="trunc"),
        "nextafter": lambda: torch.nextafter(a, b),
    }
    want = (as_eager[name]() if name in as_eager else getattr(torch, name)(a.double(), b.double())).numpy()
    with np.errstate(all="ignore"):
        exact = np.fmod(x, y)
    if name == "fmod":
        want = exact
    known = np.zeros(len(x), np.bool_)
    if name in ("remainder", "div_floor"):  # eager's own gives NaN where the quotient overflows
        known = np.isfinite(exact) & np.isnan(torch.fmod(a, b).numpy())
    limit = {"float": 1.4, "double": 3}[t] if name in ("pow", "atan2", "hypot") else 0
    for form in forms(f"{name}_{t}"):
        got = np.empty_like(x)
        run(lib, form, x, y, got, len(x))
        error = np.where(known, 0, ulps(got, want))
        i = int(error.argmax())
        assert error[i] <= limit, (form, x[i], y[i], got[i], want[i])
        if name == "copysign":
            assert (np.signbit(got) == np.signbit(y)).all(), form


def values(t: str) -> np.ndarray:
    if t == "bool":
        return np.array([False, True] * 10)
    return integers(t) if t.startswith("int") else floats(t, 20)


@pytest.mark.parametrize("t", COMPUTE)
def test_compare(lib: ctypes.CDLL, t: str) -> None:
    x, y = pairs(values(t))
    want = {"lt": x < y, "le": x <= y, "gt": x > y, "ge": x >= y, "eq": x == y, "ne": x != y}
    for name in COMPARE:
        for form in forms(f"{name}_{t}"):
            got = np.empty(len(x), np.bool_)
            run(lib, form, x, y, got, len(x))
            assert (got == want[name]).all(), form


def test_logical(lib: ctypes.CDLL) -> None:
    x, y = pairs(np.random.default_rng(2).random(100) < 0.5)
    got = np.empty_like(x)
    for name, want in (("land", x & y), ("lor", x | y), ("lxor", x ^ y)):
        for form in forms(f"{name}_bool"):
            run(lib, form, x, y, got, len(x))
            assert (got == want).all(), form
    run(lib, "lnot_bool", x, got, len(x))
    assert (got == ~x).all()


def integers(t: str) -> np.ndarray:
    """Edge values first, then integers of every magnitude."""
    info = np.iinfo(NUMPY[t])
    edges = [0, 1, -1, 2, -2, 3, -3, 7, 31, 32, 33, 63, 64, 65, -64]
    edges += [info.min, info.min + 1, info.max, info.max - 1]
    rng = np.random.default_rng(3)
    spread = rng.integers(info.min, info.max, 200, np.int64) >> rng.integers(0, info.bits, 200)
    return np.concatenate([np.array(edges, NUMPY[t]), spread.astype(NUMPY[t])])


def wrapped(value: int, bits: int) -> int:
    return (value + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))


def reference_int(name: str, a: int, b: int, bits: int) -> int:
    """What the header promises: wrapping overflow, 0 for a zero divisor, torch's rule for wide shifts."""
    fits = 0 <= b < bits
    quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1) if b else 0
    # eager's Euclid wraps: beside the smallest integer the answer may be negative
    gcd = int(torch.gcd(torch.tensor(a, dtype=DTYPE[bits]), torch.tensor(b, dtype=DTYPE[bits])))
    per_gcd = wrapped(int(math.copysign(1, a)) * int(math.copysign(1, gcd)) * (abs(a) // (abs(gcd) or 1)), bits)
    return wrapped(
        {
            "div_trunc": quotient,
            "div_floor": a // b if b else 0,
            "remainder": a % b if b else 0,
            "shl": a << b if fits else 0,
            "shr": a >> (b if fits else bits - 1),
            "gcd": gcd,
            "lcm": abs(wrapped(per_gcd * b, bits)),
            "maximum": max(a, b),
            "minimum": min(a, b),
            "band": a & b,
            "bor": a | b,
            "bxor": a ^ b,
        }[name],
        bits,
    )


@pytest.mark.parametrize("t", ["int32_t", "int64_t"])
def test_integers(lib: ctypes.CDLL, t: str) -> None:
    x, y = pairs(integers(t), 19)
    bits = x.dtype.itemsize * 8
    got = np.empty_like(x)
    for name in INT_BINARY:
        want = np.array([reference_int(name, int(a), int(b), bits) for a, b in zip(x, y)], x.dtype)
        for form in forms(f"{name}_{t}"):
            run(lib, form, x, y, got, len(x))
            wrong = np.flatnonzero(got != want)
            assert len(wrong) == 0, (form, x[wrong[0]], y[wrong[0]], got[wrong[0]], want[wrong[0]])
    with np.errstate(over="ignore"):
        unary = {"abs": np.abs(x), "neg": -x, "sign": np.sign(x), "bnot": ~x}
    for name, expected in unary.items():
        for form in forms(f"{name}_{t}"):
            run(lib, form, x, got, len(x))
            assert (got == expected).all(), form


@pytest.mark.parametrize("a", COMPUTE)
@pytest.mark.parametrize("b", COMPUTE)
def test_cast(lib: ctypes.CDLL, a: str, b: str) -> None:
    x = values(a)
    if a in ("float", "double") and b.startswith("int"):  # what does not fit is undefined
        x = np.array(
            [0.0, -0.0, 1.5, -1.5, 0.3, 2.7, -7.9, 1e6, -123456.7, 2**24 + 1, 2**30 + 64] * 4, NUMPY[a]
        )
    for form in forms(f"cast_{a}_{b}"):
        got = np.empty(len(x), NUMPY[b])
        run(lib, form, x, got, len(x))
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(got, x.astype(NUMPY[b]), err_msg=form)


@pytest.mark.parametrize("t", ["int8_t", "uint8_t", "int16_t"])
def test_wrap(lib: ctypes.CDLL, t: str) -> None:
    x = integers("int32_t")
    for form in forms(f"wrap_{t}"):
        got = np.empty_like(x)
        run(lib, form, x, got, len(x))
        assert (got == x.astype(NUMPY[t])).all(), form


def storage(t: str, size: int) -> np.ndarray:
    """Random storage values none of which is zero, so that a lane left out shows."""
    if t == "bool":
        return np.ones(size, np.bool_)
    small = np.random.default_rng(size).integers(1, 100, size)
    return (
        torch.from_numpy(small).to(LOW[t]).view(torch.uint16).numpy() if t in LOW else small.astype(NUMPY[t])
    )


@pytest.mark.parametrize("t", STORAGE)
def test_memory(lib: ctypes.CDLL, lanes: int, t: str) -> None:
    for n in range(1, 2 * lanes + 2):
        x = storage(t, 3 * n)
        mask = np.random.default_rng(n).random(n) < 0.6
        kept = np.where(mask, x[:n], 0)
        for form in forms(f"copy_{t}"):
            out = np.zeros(n + lanes, x.dtype)
            run(lib, form, x, out, n)
            assert (out[:n] == x[:n]).all() and not out[n:].any(), (form, n)
        for form in forms(f"masked_{t}"):
            out = np.ones(n, x.dtype)
            run(lib, form, x, mask, out, n)
            assert (out == kept).all(), (form, n)
        for form in forms(f"masked_store_{t}"):
            out = np.zeros(n + lanes, x.dtype)
            run(lib, form, x, mask, out, n)
            assert (out[:n] == kept).all() and not out[n:].any(), (form, n)
        out = np.zeros(3 * n + lanes, x.dtype)
        run(lib, f"strided_{t}", x, 3, mask, out, n)
        spread = out[n : 3 * n]
        assert (out[:n] == x[::3]).all()
        assert (spread[::2] == np.where(mask, x[::3], 0)).all() and not spread[1::2].any()
        index = np.random.default_rng(n).permutation(n)
        out = np.zeros((4, n), x.dtype)
        run(lib, f"permute_{t}", x, index, mask, out, n)
        assert (out[0] == x[index]).all() and (out[1] == np.where(mask, x[index], 0)).all()
        assert (out[2, index] == x[:n]).all() and (out[3, index] == kept).all()


@pytest.mark.parametrize("t", [s for s in STORAGE if s != "bool"])
def test_tail_lanes_read_zero(lib: ctypes.CDLL, lanes: int, t: str) -> None:
    kind = NUMPY[t] if t in ("double", "int64_t") else np.float32 if t in ("float", *LOW) else np.int32
    for n in range(1, lanes):
        room = np.full(lanes + 32, 7, kind)
        vector = room[-room.ctypes.data % 64 // room.itemsize :][:lanes]
        run(lib, f"zero_fill_{t}", storage(t, lanes), vector, n)
        assert vector[:n].all() and not vector[n:].any()


@pytest.mark.parametrize("times", REPEATS)
@pytest.mark.parametrize("t", STORAGE)
def test_elements_are_repeated(lib: ctypes.CDLL, lanes: int, t: str, times: int) -> None:
    for n in range(1, 3 * lanes + 2):
        x = storage(t, n)
        mask = np.random.default_rng(n).random(n) < 0.6
        out = np.ones((2, n), x.dtype)
        run(lib, f"repeated_{t}_{times}", x, mask, out, n)
        want = np.repeat(x, min(times, lanes))[:n]
        assert (out[0] == want).all() and (out[1] == np.where(mask, want, 0)).all()


@pytest.mark.parametrize("t", STORAGE)
def test_no_access_past_the_end(lib: ctypes.CDLL, lanes: int, t: str) -> None:
    """Arrays that end where an unreadable page begins: a child process survives every tail and mask."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    page = os.sysconf("SC_PAGESIZE")
    base = libc.mmap(None, 2 * page, 3, 0x22, -1, 0)
    assert libc.mprotect(ctypes.c_void_p(base + page), ctypes.c_size_t(page), 0) == 0
    size = np.dtype(NUMPY[t]).itemsize
    child = os.fork()
    if child == 0:
        for n in range(1, 2 * lanes + 1):
            end = np.ctypeslib.as_array((ctypes.c_uint8 * (n * size)).from_address(base + page - n * size))
            end[:] = 1
            out, every = np.zeros(4 * n * size, np.uint8), np.ones(n, np.bool_)
            run(lib, f"copy_{t}", end, out, n)
            run(lib, f"copy_{t}", out, end, n)
            exists = np.arange(2 * lanes) < n  # whole vectors, of which the mask keeps what exists
            wide = np.zeros(2 * lanes * size, np.uint8)
            run(lib, f"masked_{t}", end, exists, wide, 2 * lanes)
            run(lib, f"masked_store_{t}", wide, exists, end, 2 * lanes)
            run(lib, f"strided_{t}", end, 1, every, np.zeros(4 * n * size, np.uint8), n)
            run(lib, f"permute_{t}", end, np.arange(n), every, out, n)
            for times in (min(r, lanes) for r in REPEATS):
                many = np.ones(n * times, np.bool_)
                run(lib, f"repeated_{t}_{times}", end, many, np.zeros(2 * n * times * size, np.uint8), n * times)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, "a kernel touched memory past the end"
    libc.munmap(ctypes.c_void_p(base), ctypes.c_size_t(2 * page))


@pytest.mark.parametrize("t", ["bf16", "half"])
def test_low_precision_is_bit_exact(lib: ctypes.CDLL, t: str) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    want = torch.from_numpy(patterns).view(LOW[t]).float().numpy()
    rng = np.random.default_rng(4)
    ties = (want.view(np.uint32) + np.uint32(0x8000 if t == "bf16" else 0x1000)).view(np.float32)
    scattered = rng.integers(0, 1 << 32, 1 << 18, np.uint32).view(np.float32)
    subnormal = rng.standard_normal(1 << 16, np.float32) * np.float32(1e-5)
    with np.errstate(all="ignore"):
        below = np.nextafter(ties, np.float32(0))
    x = np.concatenate([want, ties, below, scattered, subnormal, floats("float")])
    bits = torch.from_numpy(x).to(LOW[t]).view(torch.uint16).numpy()
    for form in forms(f"from_{t}"):
        got = np.empty(1 << 16, np.float32)
        run(lib, form, patterns, got, 1 << 16)
        assert ((got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))).all(), form
    for form in forms(f"to_{t}"):
        out = np.empty(len(x), np.uint16)
        run(lib, form, x, out, len(x))
        nan = torch.from_numpy(out).view(LOW[t]).isnan().numpy()
        assert ((out == bits) | nan).all() and (nan == np.isnan(x)).all(), form
    for form in forms(f"round_{t}"):
        got = np.empty(len(x), np.float32)
        run(lib, form, x, got, len(x))
        np.testing.assert_array_equal(got, torch.from_numpy(bits).view(LOW[t]).float().numpy(), err_msg=form)


@pytest.mark.parametrize("t", [s for s in STORAGE if s != "bool"])
def test_scatter_add_counts_duplicates(lib: ctypes.CDLL, t: str) -> None:
    n = 57
    rng = np.random.default_rng(5)
    x, index, mask = storage(t, n), rng.integers(0, 5, n), rng.random(n) < 0.7
    out = np.zeros(5, x.dtype)
    run(lib, f"scatter_add_{t}", x, index, mask, out, n)
    values = torch.from_numpy(x).view(LOW.get(t, torch.from_numpy(x).dtype))
    want = torch.zeros(5, dtype=values.dtype)
    for i in np.flatnonzero(mask):
        want[index[i]] += values[i]
    assert torch.equal(torch.from_numpy(out).view(values.dtype), want)


@pytest.mark.parametrize("t", [s for s in STORAGE if s != "bool"])
def test_atomic_add_loses_nothing(lib: ctypes.CDLL, t: str) -> None:
    n = {"bf16": 256, "half": 2048}.get(t, 1 << 14)
    one = torch.ones(16, dtype=LOW[t]).view(torch.uint16).numpy() if t in LOW else np.ones(16, NUMPY[t])
    out = np.zeros(1, one.dtype)
    run(lib, f"atomic_add_{t}", one, out, n)
    total = torch.from_numpy(out).view(LOW[t]).item() if t in LOW else out[0]
    assert total == (n if t in LOW else np.array(n).astype(NUMPY[t]))


@pytest.mark.parametrize("t", ["float", "double", "int32_t", "int64_t"])
def test_horizontal(lib: ctypes.CDLL, lanes: int, t: str) -> None:
    rng = np.random.default_rng(6)
    for case in range(40):
        x = rng.integers(-2, 3, lanes).astype(NUMPY[t])
        if t in ("float", "double") and case % 3 == 0:
            x[rng.integers(0, lanes, 2)] = np.nan
        index = rng.permutation(lanes) + (1 << 40)
        out, arg = np.empty(4, x.dtype), np.empty(2, np.int64)
        run(lib, f"horizontal_{t}", x, index, out, arg)
        np.testing.assert_array_equal(out, [x.sum(), x.prod(), x.max(), x.min()])
        for got, best in zip(arg, (x.max(), x.min())):
            assert got == index[np.isnan(x) if np.isnan(best) else x == best].min()
    for n in range(1, lanes):
        x, total = storage(t, lanes), np.empty(1, NUMPY[t])
        run(lib, f"tail_sum_{t}", x, total, n)
        assert total[0] == x[:n].sum() + n


def test_any_all(lib: ctypes.CDLL, lanes: int) -> None:
    for hot in (0, 1, lanes):
        assert run(lib, "any_all", np.arange(lanes) < hot) == (hot > 0) + 2 * (hot == lanes)


def test_iota(lib: ctypes.CDLL) -> None:
    wide, narrow = np.empty(37, np.int64), np.empty(37, np.int32)
    run(lib, "iota_int64_t", wide, 37)
    run(lib, "iota_int32_t", narrow, 37)
    assert (wide == np.arange(37) + (1 << 40)).all() and (narrow == np.arange(37) - 3).all()


@pytest.mark.parametrize("by", [1, 2, 3, 7, 14, 49, 96, 1009, (1 << 21) - 1, 1 << 21])
def test_small_quotients_are_exact(lib: ctypes.CDLL, by: int) -> None:
    n = 1 << 21
    quotient, remainder = np.empty(n, np.int32), np.empty(n, np.int32)
    run(lib, "small_parts", quotient, remainder, by, n)
    assert (quotient == np.arange(n) // by).all() and (remainder == np.arange(n) % by).all()


def test_where_takes_scalars_and_mixed_widths(lib: ctypes.CDLL) -> None:
    rng = np.random.default_rng(7)
    mask = rng.random(37) < 0.5
    for t in ("float", "int64_t"):
        x = rng.integers(0, 9, 37).astype(NUMPY[t])
        for form in forms(f"where_{t}"):
            got = np.empty_like(x)
            run(lib, form, mask, x, got, 37)
            assert (got == np.where(mask, x, -1)).all(), form
    small, y = rng.integers(-9, 9, 37).astype(np.int8), rng.integers(0, 4, 37).astype(np.float64)
    out = np.empty(37, np.float16)
    run(lib, "mixed", small, y, out, 37)
    assert (out == np.where(y < 2, small * 2.0 + y, 0.5)).all()


def test_fma_rounds_once(lib: ctypes.CDLL) -> None:
    x = (1 + np.arange(1, 100) * 2.0**-12).astype(np.float32)
    want = (x.astype(np.float64) ** 2 - 1).astype(np.float32)
    for form in forms("fma_float"):
        got = np.empty_like(x)
        run(lib, form, x, x, got, len(x))
        assert (got == want).all(), form


def test_vectors_stay_in_registers(libraries: dict[int, ctypes.CDLL]) -> None:
    """The AVX-512 kernels use the widest registers and spill none to the stack."""
    if 16 not in libraries or shutil.which("objdump") is None:
        pytest.skip("needs AVX-512 and objdump")
    command = ["objdump", "-d", "--no-show-raw-insn", libraries[16]._name]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    functions = {part.split(">:", 1)[0].split("<")[-1]: part for part in listing.split("\n\n")}
    for kernel in "exp_float tanh_float sigmoid_float sqrt_double maximum_float copy_bf16 mixed".split():
        lines = functions[kernel].splitlines()
        assert any("zmm" in line for line in lines), kernel
        assert not any("(%rsp)" in line and "mm" in line for line in lines), kernel


def test_the_header_is_cheap_to_compile(tmp_path: Path) -> None:
    """Generated code pays for the header in every translation unit: it pulls in no large one."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    (tmp_path / "empty.cpp").write_text('#include "dicp_vec.h"\n')
    command = [*COMPILER.command, "-std=c++17", "-E", f"-I{INCLUDE}", str(tmp_path / "empty.cpp")]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert len(text.splitlines()) < 4000

"""Bad input: what is raised, and what it says."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import close
from torch._dynamo.exc import BackendCompilerFailed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from dicp.config import MODES
from dicp.errors import (
    BuildError,
    DicpError,
    InternalError,
    NoCompileError,
    OptionError,
    ToolchainError,
    UnsupportedOp,
)
from dicp.ops.table import table
from dicp.passes import PASSES
from dicp.runtime.failure import Failure, LibraryCall


def r(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def failure(fn, *args, **compile_options) -> BaseException:
    """What a first call raises, without Dynamo's wrapping."""
    with pytest.raises(Exception) as caught:
        torch.compile(fn, backend="dicp_cpu", **compile_options)(*args)
    error: BaseException = caught.value
    if isinstance(error, BackendCompilerFailed):
        error = error.inner_exception
    return error


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ({"options": {"stric": True}}, "strict"),
        ({"options": {"nummerics": "eager"}}, "numerics"),
        ({"options": {"isa": "avx-512"}}, "avx512"),
        ({"mode": "max_autotune"}, "max-autotune"),
        ({"mode": "reduce-overheads"}, "reduce-overhead"),
    ],
)
def test_unknown_words_are_refused_with_near_matches(given: dict, near: str) -> None:
    error = failure(lambda x: x + 1, r(3), **given)
    assert isinstance(error, OptionError)
    assert f"did you mean '{near}'" in str(error)


@pytest.mark.parametrize("given", [{"mode": 3}, {"options": ["strict"]}])
def test_words_of_another_type_are_refused(given: dict) -> None:
    assert isinstance(failure(lambda x: x + 1, r(3), **given), OptionError)


def test_option_of_the_wrong_type() -> None:
    error = failure(lambda x: x + 1, r(3), options={"strict": "yes"})
    assert isinstance(error, OptionError) and "bool" in str(error)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_of_torch_compile_is_accepted(mode: str) -> None:
    x = r(5)
    close(torch.compile(lambda x: x * 2 + 1, backend="dicp_cpu", mode=mode)(x), x * 2 + 1)


def extern_model(x):
    return torch.nn.functional.rrelu(x * 2, training=True).sum()  # the extern call


def test_strict_names_op_line_and_remedy() -> None:
    error = failure(extern_model, r(4, 4), options={"strict": True})
    assert isinstance(error, UnsupportedOp)
    text = str(error)
    assert "rrelu" in text and "strict" in text and "docs/adding_an_op.md" in text
    assert f"{Path(__file__).name}:" in text and "# the extern call" in text


def faulty_model(x):
    return x.sin() + 1  # the faulty op


def test_a_fault_of_a_rule_names_op_and_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def lower(lowering, node, args, kwargs):
        raise KeyError("no such axis")

    rows = dict(table())
    rows[torch.ops.aten.sin.default] = SimpleNamespace(lower=lower)
    monkeypatch.setattr("dicp.schedule.lower.table", lambda: rows)
    error = failure(faulty_model, r(4, 4))
    assert isinstance(error, InternalError) and isinstance(error.__cause__, KeyError)
    text = str(error)
    assert "lowering sin failed" in text and "KeyError: 'no such axis'" in text and "DICP_DUMP" in text
    assert f"{Path(__file__).name}:" in text and "# the faulty op" in text


def test_a_fault_of_a_pass_names_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(gm, vendor):
        raise KeyError("no such node")

    passes = tuple(p._replace(run=run) if p.name == "rewrite_dot" else p for p in PASSES)
    monkeypatch.setattr("dicp.passes.PASSES", passes)
    error = failure(faulty_model, r(4, 4))
    assert isinstance(error, InternalError) and isinstance(error.__cause__, KeyError)
    assert "the pass rewrite_dot failed: KeyError: 'no such node'" in str(error) and "DICP_DUMP" in str(error)


def counts_a_step(step, x):
    step.add_(1)  # the write
    return x * step


@pytest.mark.skipif(torch.__version__ >= "2.14", reason="torch keeps it: test_writes_to_other_counters_are_kept")
def test_a_write_that_torch_would_lose_is_refused() -> None:
    """Silently wrong under aot_eager and Inductor: float64, no dims, nothing reads what the call returns."""
    x = r(3)
    error = failure(counts_a_step, torch.tensor(1.0, dtype=torch.float64), x)
    assert isinstance(error, DicpError)
    text = str(error)
    assert "lose this write" in text and "shape (1,)" in text
    assert f"{Path(__file__).name}:" in text and "# the write" in text


COUNTERS = [torch.tensor(1.0), torch.tensor([1.0], dtype=torch.float64), torch.tensor(1)]
COUNTERS += [torch.tensor(1.0, dtype=torch.float64)] if torch.__version__ >= "2.14" else []


@pytest.mark.parametrize("step", COUNTERS)
def test_writes_to_other_counters_are_kept(step: torch.Tensor) -> None:
    torch._dynamo.reset()
    x, given = r(3), step.clone()
    close(torch.compile(counts_a_step, backend="dicp_cpu")(given, x), x * (step + 1))
    assert torch.equal(given, step + 1)


def test_numbers_that_are_only_read_are_traced_again() -> None:
    scale, x = torch.tensor(1.5, dtype=torch.float64), r(3)
    close(torch.compile(lambda s, x: x * s.sin(), backend="dicp_cpu")(scale, x), x * scale.sin())


def test_strict_lets_library_calls_pass() -> None:
    x = r(4, 4)
    close(
        torch.compile(lambda x: (x @ x).relu(), backend="dicp_cpu", options={"strict": True})(x),
        (x @ x).relu(),
    )


def lookup(table, i):
    y = table[i]  # the lookup
    return y * 2


@pytest.mark.parametrize("bad", [7, -8, 1 << 40])
def test_index_out_of_range_raises_index_error_with_the_users_line(bad: int) -> None:
    f = torch.compile(lookup, backend="dicp_cpu")
    table = r(7, 3)
    close(f(table, torch.tensor([0, -7, 6])), lookup(table, torch.tensor([0, -7, 6])))
    with pytest.raises(IndexError) as caught:
        f(table, torch.tensor([0, bad]))
    assert "out of range" in str(caught.value)
    assert f"{Path(__file__).name}:" in str(caught.value) and "# the lookup" in str(caught.value)


INDEXED = {
    "embedding": lambda t, i: torch.nn.functional.embedding(i, t),
    "gather": lambda t, i: t.gather(0, i[:, None]),
    "index_select": lambda t, i: t.index_select(0, i),
    "index_add": lambda t, i: t.index_add(0, i, torch.ones(2, 3)),
    "scatter": lambda t, i: t.scatter(0, i[:, None], 1.0),
    "index_put": lambda t, i: t.index_put((i,), torch.ones(2, 3)),
    "index_copy": lambda t, i: t.index_copy(0, i, torch.ones(2, 3)),
    "nll_loss": lambda t, i: torch.nn.functional.nll_loss(t.t()[:2], i),
}


def test_index_out_of_range_names_the_line_that_looks_up() -> None:
    """Not the line that reads what was looked up, in whose kernel that is."""

    def model(t: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        rows = t[i]
        return (rows + 1).softmax(-1).relu()

    with pytest.raises(IndexError, match=r"rows = t\[i\]"):
        torch.compile(model, backend="dicp_cpu")(torch.randn(4, 5), torch.tensor([1, 9]))


@pytest.mark.parametrize("bad", [-1, 16])
def test_unpooling_checks_each_plane(bad: int) -> None:
    """A position beyond one plane lies in the next."""
    places = torch.tensor([[[0, 3], [9, 15]], [[0, 3], [bad, 15]]])
    f = torch.compile(lambda x, i: torch.nn.functional.max_unpool2d(x, i, 2), backend="dicp_cpu")
    with pytest.raises(IndexError):
        f(torch.ones(2, 2, 2), places)


@pytest.mark.parametrize("name", INDEXED)
def test_every_indexing_op_checks(name: str) -> None:
    fn = INDEXED[name]
    with pytest.raises(IndexError):
        torch.compile(fn, backend="dicp_cpu")(r(7, 3), torch.tensor([0, 7]))


DIVISIONS = {
    "floor_divide": lambda x, y: x // y,
    "remainder": lambda x, y: x % y,
    "truncated": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "fmod": lambda x, y: torch.fmod(x, y),
    "of_a_number": lambda x, y: 5 // y,
    "not_selected": lambda x, y: torch.where(y == 0, x, x // y),
    "reduced": lambda x, y: (x % y).sum(),
}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8], ids=str)
def test_integer_division_by_zero_raises_as_in_eager(dtype: torch.dtype) -> None:
    x, y = torch.arange(1, 42).to(dtype), torch.arange(1, 42).to(dtype)
    for fn in DIVISIONS.values():
        f = torch.compile(fn, backend="dicp_cpu")
        close(f(x, y), fn(x, y))
        for bad in (0, 17, 40):  # in a whole vector, and in the rest
            zero = y.clone()
            zero[bad] = 0
            with pytest.raises(RuntimeError, match="ZeroDivisionError"):
                fn(x, zero)
            with pytest.raises(RuntimeError, match="ZeroDivisionError") as caught:
                f(x, zero)
            assert isinstance(caught.value, ZeroDivisionError) and Path(__file__).name in str(caught.value)
        close(f(x, y), fn(x, y))  # the next call is well
        torch._dynamo.reset()


def test_what_nobody_divides_is_no_division_by_zero() -> None:
    x, y = torch.arange(1, 9), torch.tensor([2, 0])

    def fn(x, y):  # the second half is not divided
        return torch.cat([x[:4] // y[0], x[4:]]), x / y[1], (x * 1.5) // y[1], x // 3

    close(torch.compile(fn, backend="dicp_cpu")(x, y), fn(x, y))
    with pytest.raises(RuntimeError, match="negative integer powers"):
        torch.compile(lambda x: x**-1, backend="dicp_cpu")(x)


def test_user_shape_error_is_eagers() -> None:
    def bad(x, y):
        return (x @ y).relu()

    for fn, args in (
        (bad, (r(3, 4), r(5, 6))),
        (lambda x, y: x + y, (r(3, 4), r(5, 6))),
        (lambda x, y: torch.cat([x, y]), (r(3, 4), r(5, 6))),
        (lambda x, y: x.view(7, 7), (r(3, 4), r(1))),
    ):
        with pytest.raises(Exception) as eager:
            fn(*args)
        with pytest.raises(Exception) as mine:
            torch.compile(fn, backend="dicp_cpu")(*args)
        assert isinstance(mine.value, type(eager.value))
        assert not isinstance(mine.value, (DicpError, BackendCompilerFailed))
        torch._dynamo.reset()


def fresh(value: float):
    """A function whose kernel is in no cache."""
    return lambda x: (x * value).exp() + value


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DICP_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def script(folder: Path, text: str) -> str:
    path = folder / "fake-cxx"
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return str(path)


def test_missing_compiler_says_what_to_install(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(empty_cache))
    monkeypatch.delenv("CXX", raising=False)
    error = failure(fresh(1.25), r(5))
    assert isinstance(error, ToolchainError)
    assert (
        "no C++ compiler" in str(error) and "apt-get install g++" in str(error) and "DICP_CXX" in str(error)
    )


FAKE = """case "$*" in
  *--version*) echo "fake 1.0"; exit 0 ;;
  *-dumpmachine*) echo "x86_64-linux-gnu"; exit 0 ;;
esac
echo "unit.cpp:7:3: error: this compiler refuses everything" >&2
exit 1
"""


def doomed(x):
    return (x * 0.123).exp() + 7  # the doomed line


def test_failing_build_shows_message_file_and_line(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DICP_CXX", script(empty_cache, FAKE))
    error = failure(doomed, r(5))
    assert isinstance(error, BuildError)
    assert "this compiler refuses everything" in str(error)
    assert "# the doomed line" in str(error)
    assert os.path.exists(error.source) and "exp" in Path(error.source).read_text()


def test_no_compile_refuses_to_build_but_serves_what_is_cached(empty_cache: Path) -> None:
    x = r(5)
    fn = fresh(3.5)
    assert isinstance(failure(fn, x, options={"no_compile": True}), NoCompileError)
    torch._dynamo.reset()
    torch.compile(fn, backend="dicp_cpu")(x)
    torch._dynamo.reset()
    close(torch.compile(fn, backend="dicp_cpu", options={"no_compile": True})(x), fn(x))


REFUSED: dict[str, tuple[Any, ...]] = {  # by eager; the fake tensors of some torch let them pass
    "softmax": (lambda x: x.softmax(5), r(3, 4)),
    "sort": (lambda x: x.sort(5), r(3, 4)),
    "select_scatter": (lambda x, y: x.select_scatter(y, -3, 0), r(3, 4), r(4)),
    "mm": (lambda x, y: x @ y, r(3, 4), r(4, 3).bfloat16()),
    "linear": (F.linear, r(3, 4), r(4, 4), r(4).double()),
    "bits": (lambda x: x & x, r(3)),
    "max": (lambda x: x.max(), r(0)),
    "max_of_rows": (lambda x: x.max(1), r(3, 0)),
    "min_of_columns": (lambda x: x.min(-2).values, r(0, 3)),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_what_eager_refuses_raises_as_in_eager(name: str, strict: bool) -> None:
    fn, *args = REFUSED[name]
    with pytest.raises(Exception) as eager:
        fn(*args)
    with pytest.raises(Exception) as mine:
        torch.compile(fn, backend="dicp_cpu", options={"strict": strict})(*args)
    assert isinstance(mine.value, type(eager.value))
    assert str(eager.value).partition("\n")[0] in str(mine.value)


def test_failing_library_call_says_why() -> None:
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    sizes, strides, handle = (ctypes.c_int64 * 1)(-7), (ctypes.c_int64 * 1)(1), ctypes.c_void_p()
    device = ctypes.c_int32(0)
    failed = library.aoti_torch_empty_strided(
        ctypes.c_int64(1), sizes, strides, ctypes.c_int32(6), device, device, ctypes.byref(handle)
    )
    assert failed
    with pytest.raises(DicpError, match="aten.one: the library call failed: ") as error:
        Failure(("",), (LibraryCall("aten.one", (), {}, (), "model.py:1"),))(-1)
    assert "model.py:1" in str(error.value)
    if hasattr(library, "torch_exception_get_what_without_backtrace"):
        assert "-7" in str(error.value)


def test_unknown_vendor_names_near_match() -> None:
    from dicp import vendor

    with pytest.raises(DicpError, match="did you mean 'cpu_graph'"):
        vendor.get("cpu_grph")
    with pytest.raises(DicpError, match="no vendor serves device 'tpu'"):
        vendor.for_device("tpu")


@pytest.mark.parametrize("dynamic", [False, True])
def test_tensors_without_memory_are_refused(dynamic: bool) -> None:
    """Where their addresses, which are 0, would be read."""
    fns = [lambda x: x.sin() + 1, lambda x: (x @ x).exp()]
    compiled = [torch.compile(fn, backend="dicp_cpu", dynamic=dynamic) for fn in fns]
    with FakeTensorMode():
        fake = torch.randn(4, 4)
    for fn in compiled:
        assert fn(torch.randn(4, 4)).shape == (4, 4) and fn(torch.randn(0, 0)).shape == (0, 0)
        with pytest.raises(DicpError, match="no memory"):
            fn(fake)
        with FakeTensorMode(), pytest.raises(DicpError, match="no memory"):
            fn(torch.randn(4, 4))
    with pytest.raises(DicpError, match="no memory"):
        compiled[0](torch._efficientzerotensor(4, 4))


def test_what_torch_tells_no_memory_of_is_refused() -> None:
    x = torch.randn(4, requires_grad=True)
    y = torch.compile(lambda x: x.sin() * 2, backend="dicp_cpu")(x)
    with pytest.raises(DicpError, match="is_grads_batched"):
        torch.autograd.grad(y, x, torch.eye(4), is_grads_batched=True)
    refusal = (DicpError, "MKL-DNN") if torch.__version__ < "2.14" else (RuntimeError, "mkldnn layout")  # torch's
    with pytest.raises(refusal[0], match=refusal[1]):
        torch.compile(lambda x: x.relu(), backend="dicp_cpu")(torch.randn(4, 4).to_mkldnn())


def test_unsigned_integers_that_eager_does_not_add() -> None:
    with pytest.raises(NotImplementedError, match="UInt16"):
        torch.compile(lambda x: x + x, backend="dicp_cpu")(torch.ones(4, dtype=torch.uint16))


def test_tangents_are_refused_where_they_would_be_lost() -> None:
    compiled = torch.compile(lambda x: x.sin() * 2, backend="dicp_cpu")
    x, t = torch.randn(3), torch.randn(3)
    with forward_ad.dual_level():
        torch.testing.assert_close(compiled(x), x.sin() * 2)
        with pytest.raises(DicpError, match="tangent"):
            compiled(forward_ad.make_dual(x, t))
    _, along = torch.func.jvp(compiled, (x,), (t,))
    torch.testing.assert_close(along, 2 * x.cos() * t)

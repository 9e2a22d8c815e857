"""Out-of-tree kernel vendors, as docs/adding_a_vendor.md tells of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.exc import BackendCompilerFailed

import dicp
from dicp.compiler import observe
from dicp.config import Config
from dicp.dynamo_bridge.backend import backend_for
from dicp.errors import BuildError, CacheError, VendorError
from dicp.ir.expr import BINARY, TERNARY, UNARY, Expr
from dicp.ir.value import KINDS
from dicp.scaffold import render, toy, toy_loops
from dicp.vendor.asking import asked, emitted, has, require_whole
from dicp.vendor.base import HOOKS, Claim, GraphVendor, LayoutCosts, Vendor, VendorBase


def r(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def put(x, i, y):
    x[i] = y
    return x * 2


def block(x, w, b):
    return x + F.linear(F.gelu(F.layer_norm(x, (8,))), w, b).softmax(-1)


CASES = {
    "pointwise": (lambda x, y: torch.relu(x * y + 1) - y.exp(), r(3, 7), r(7)),
    "rows": (lambda x: (x.softmax(1), x.sum(1), x.argmax(1), *torch.var_mean(x, 1)), r(4, 9)),
    "columns": (lambda x: (x.mean(0), x.amax(0)), r(4, 9)),
    "scans": (lambda x: (x.cumsum(1), x.cummax(0), x.logcumsumexp(1)), r(4, 9)),
    "views": (lambda x, y: torch.cat([x, F.pad(y, (1, 1))], 1).roll(2, 1).tril(), r(4, 5), r(4, 2)),
    "gather": (lambda w, i: F.embedding(i, w) + 1, r(9, 5), torch.tensor([[1, 8], [0, 3]])),
    "scatter": (lambda x, i, y: x.index_add(0, i, y), r(9, 5), torch.tensor([1, 1, 3]), r(3, 5)),
    "mutation": (put, r(9, 5), torch.tensor([3, 1]), r(2, 5)),
    "libraries": (block, r(4, 8), r(8, 8), r(8)),
    "convolution": (lambda x, w: F.conv2d(x, w, padding=1).relu(), r(2, 3, 5, 5), r(4, 3, 3, 3)),
    "bfloat16": (lambda x: x.softmax(1) * x, r(4, 9).bfloat16()),
    "integers": (
        lambda x, y: (x // y, x % y, x & y, x << 2, ~x, x > y),
        torch.arange(-5, 5),
        torch.arange(1, 11),
    ),
    "a temporary in a result": (
        lambda x, w, v: (x.softmax(1) @ w).sin() @ v,
        r(16, 512),
        r(512, 16),
        r(16, 2048),
    ),
    "extern": (lambda x: torch.linalg.svdvals(x.exp()) + 1, r(4, 4)),
}


by_example = pytest.mark.parametrize("example", [toy, toy_loops], ids=["toy", "toy_loops"])


@by_example
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_eager(name: str, dynamic: bool, example: Any) -> None:
    fn, *args = CASES[name]
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=example.backend, dynamic=dynamic, fullgraph=True)
    for _ in range(2):
        mine, theirs = [a.clone() for a in args], [a.clone() for a in args]
        got, want = compiled(*mine), fn(*theirs)
        low = want.dtype == torch.bfloat16 if isinstance(want, torch.Tensor) else False
        torch.testing.assert_close(got, want, rtol=2e-2 if low else 1e-4, atol=1e-5)
        torch.testing.assert_close(mine, theirs)


def test_a_vendor_is_told_that_a_compile_begins() -> None:
    told: list[Any] = []

    class Warm(toy.Toy):
        def warm_up(self, gm: torch.fx.GraphModule, config: Any) -> None:
            told.append((config.interpret, len(gm.graph.nodes)))

    f = torch.compile(lambda x: x + 1, backend=backend_for(Warm()))
    f(torch.ones(3)), f(torch.ones(3))
    assert told == [(False, 3)]


class Faulty(toy.Toy):
    """Whose function of one name is another's."""

    def __init__(self, **instead: Any) -> None:
        self.__dict__.update(instead)


def failure(vendor: Any, fn: Any = lambda x: x @ x + 1) -> VendorError:
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed) as raised:
        torch.compile(fn, backend=backend_for(vendor))(r(4, 4))
    error = raised.value.__cause__ or raised.value.inner_exception
    assert isinstance(error, VendorError), error
    return error


def fails(*args: Any) -> Any:
    raise KeyError("no such word")


@pytest.mark.parametrize("what", ["available", "keeps", "supports", "claim", "machine", "assemble"])
def test_what_a_vendor_raises_names_it(what: str) -> None:
    error = failure(Faulty(**{what: fails}), lambda x: F.linear(x, x).relu() + 1)
    assert f"toy.{what} failed" in str(error) and "KeyError: 'no such word'" in str(error)
    assert isinstance(error.__cause__, KeyError)
    assert (Path(__file__).name in str(error)) == (what in ("claim", "supports"))
    assert "report it" not in str(error) and "adding_a_vendor" in str(error)


def test_a_claim_that_fails_or_is_none() -> None:
    broken = Claim("matmul", toy.emit_out, out=True, prepare=fails)
    text = str(failure(Faulty(claim=lambda node, config: broken if "mm" in str(node.target) else None)))
    assert "the claim 'matmul' of toy for aten.mm.default failed: KeyError" in text and Path(__file__).name in text
    assert "toy.claim gave True for aten.mm.default" in str(failure(Faulty(claim=lambda node, config: True)))


def product_by(**how: Any) -> Faulty:
    """A vendor that claims products so."""
    claim = Claim("mine", **how)
    return Faulty(claim=lambda node, config: claim if "mm" in str(node.target) else None)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"emit": fails}, "KeyError: 'no such word'"),
        ({"emit": lambda writer, call: None, "out": True}, "it writes no line"),
        ({"emit": lambda writer, call: writer.line("result = 1")}, ", which the library allocates (`keep`)"),
        ({"emit": toy.emit_new, "prepare": lambda low, node, args: None}, "`prepare` gave None"),
    ],
)
def test_a_claim_that_writes_wrongly_is_named(how: dict[str, Any], text: str) -> None:
    error = str(failure(product_by(**how)))
    assert "the claim 'mine'" in error and "aten.mm.default" in error and text in error
    assert Path(__file__).name in error and "report it" not in error


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("x.double()", "keeps torch.float64 [4, 4], where torch.float32 [4, 4] is due"),
        ("x[0]", "keeps torch.float32 [4], where torch.float32 [4, 4] is due"),
        ("[x]", "keeps list, where torch.float32 [4, 4] is due"),
    ],
)
def test_what_a_library_gives_is_what_was_traced(expression: str, text: str) -> None:
    def emit(writer: Any, call: Any) -> None:
        writer.line(f"x = {writer.value(call.args[0])}")
        writer.keep(call, expression)

    torch._dynamo.reset()
    run = torch.compile(lambda x: x @ x + 1, backend=backend_for(product_by(emit=emit)))
    with pytest.raises(VendorError, match=re.escape(f"the claim 'mine', for aten.mm.default, {text}")) as raised:
        run(r(4, 4))
    assert Path(__file__).name in str(raised.value)


def test_verified_calls_write_what_they_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = product_by(emit=lambda writer, call: writer.line("pass"), out=True)
    for kept in (lazy, toy.vendor):
        torch._dynamo.reset()
        monkeypatch.setenv("DICP_VERIFY", "1")
        run = torch.compile(lambda x: x @ x.t() + 1, backend=backend_for(kept))
        if kept is lazy:
            with pytest.raises(VendorError, match=r"'mine', for aten.mm.default, has `out` and wrote nothing"):
                run(r(4, 4))
        else:
            x = r(4, 4)
            torch.testing.assert_close(run(x), x @ x.t() + 1)


def test_a_line_that_is_no_python_is_shown() -> None:
    error = str(failure(product_by(emit=lambda writer, call: writer.line("x = = 1"), out=True)))
    assert "the claim 'mine' could not write its call of aten.mm.default: invalid syntax in line" in error
    assert "function: x = = 1" in error and Path(__file__).name in error


def test_tracebacks_show_the_programs_lines() -> None:
    torch._dynamo.reset()
    wrong = product_by(emit=lambda writer, call: writer.line("no_such_name()", call.note), out=True)
    with pytest.raises(NameError) as raised:
        torch.compile(lambda x: x @ x + 1, backend=backend_for(wrong))(r(4, 4))
    last = traceback.extract_tb(raised.value.__traceback__)[-1]
    assert str(last.line).startswith("no_such_name()  # mm") and Path(__file__).name in str(last.line)


def test_a_return_code_of_none_of_its_checks_is_the_vendors() -> None:
    assert isinstance(toy_loops.failed("k", ["IndexError: index"], 1), IndexError)
    for code in (2, -1):
        assert "kernel k of 1 checks returned" in str(toy_loops.failed("k", ["IndexError: index"], code))


def test_a_kernel_that_cannot_be_written_is_named() -> None:
    def assemble(program: Any, config: Any) -> Any:
        return emitted(program, fails)

    error = failure(Faulty(assemble=assemble), lambda x: x.sin() + 1)
    assert re.search(r"no code could be written for the kernel add_\w+: KeyError", str(error))
    assert re.search(rf"at sin .*{Path(__file__).name}:\d+", str(error)) and "report it" not in str(error)


@pytest.mark.parametrize(
    ("results", "text"),
    [
        (lambda x: x.double(), "torch.float64 [4, 4], where torch.float32 [4, 4] is due"),
        (lambda x: x[:2], "torch.float32 [2, 4], where torch.float32 [4, 4] is due"),
        (lambda x: None, "NoneType, where torch.float32 [4, 4] is due"),
    ],
)
def test_what_a_function_of_the_vendors_own_gives_is_checked(results: Any, text: str) -> None:
    torch._dynamo.reset()
    own = Faulty(assemble=lambda program, config: lambda args: (results(args[0]),))
    message = r"toy: graph\d+_inference gave as result 1 of 1, of mul .*" + re.escape(text)
    with pytest.raises(VendorError, match=message):
        torch.compile(lambda x: x * 3, backend=backend_for(own))(r(4, 4))


def test_what_lacks_a_word_is_an_extern() -> None:
    """Of primitives, reductions and scans."""

    def fn(x: torch.Tensor) -> Any:
        return x.sin().exp().sum(1), x.amax(1), x.cumsum(1), x.cosh()

    lacking = Faulty(words=toy.vendor.words - {"sin", "max", "scan"})
    x = r(4, 9)
    torch._dynamo.reset()
    with observe(lambda c: seen.append({k for k in c.counts if "extern:" in k})):
        seen: list[set[str]] = []
        torch.testing.assert_close(torch.compile(fn, backend=backend_for(lacking))(x), fn(x))
    assert seen == [{f"extern:aten.{op}" for op in ("sin.default", "amax.default", "cumsum.default")}]
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed, match=r"no word for sin\)[\s\S]* give toy a word for sin, or a claim"):
        torch.compile(fn, backend=backend_for(lacking), options={"strict": True})(x)


def test_what_lacks_a_word_happens_once() -> None:
    """The scatter that lowering made before it met the word is gone."""

    def fn(x: torch.Tensor, i: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.index_add_(0, i, y, alpha=2)
        return x + 1

    for words in (toy.vendor.words, toy.vendor.words - {"mul"}):
        torch._dynamo.reset()
        mine, i, y = torch.zeros(3, 4), torch.tensor([1, 1]), torch.ones(2, 4)
        theirs = mine.clone()
        run = torch.compile(fn, backend=backend_for(Faulty(words=words)))
        torch.testing.assert_close(run(mine, i, y), fn(theirs, i, y))
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(
    ("instead", "text"),
    [
        ({"fingerprint": lambda config: None}, "toy.fingerprint gave None, which is no text"),
        ({"available": lambda config: True}, "toy.available gave True, which is neither None nor a text"),
        ({"machine": lambda config: None}, "toy.machine gave None, which is no Machine"),
        ({"emits": True}, "toy.emits is True, not a function"),
    ],
)
def test_what_is_no_answer_is_told(instead: dict[str, Any], text: str) -> None:
    assert text in str(failure(Faulty(**instead)))


def test_an_op_whose_keeping_fails_is_named() -> None:
    assert re.search(r"toy.keeps failed on aten\.\w+\.\w+: KeyError", str(failure(Faulty(keeps=fails))))


def test_strict_tells_which_promise_was_broken() -> None:
    torch._dynamo.reset()
    kept = Faulty(claim=lambda node, config: None)
    with pytest.raises(BackendCompilerFailed, match=r"toy\.claim give one for it, or toy\.keeps leave it"):
        torch.compile(lambda x: x @ x, backend=backend_for(kept), options={"strict": True})(r(4, 4))


def test_what_assemble_gives() -> None:
    """Something to call; AOTAutograd need not be told that it takes a list."""
    assert "assemble gave None" in str(failure(Faulty(assemble=lambda program, config: None)))
    x = r(4, 4)
    plain = Faulty(assemble=lambda program, config: lambda args: [args[0] * 3])
    torch.testing.assert_close(torch.compile(lambda x: x * 3, backend=backend_for(plain))(x), x * 3)


def test_half_a_vendor_is_refused() -> None:
    class Half:
        name, device = "half", "cpu"

        def available(self, config: Any) -> None: ...

    with pytest.raises(VendorError, match="lacks supports, keeps, fingerprint, claim, machine, assemble"):
        backend_for(Half())
    with pytest.raises(VendorError, match="the class Toy"):
        backend_for(toy.Toy)


@pytest.mark.parametrize(
    ("instead", "text"),
    [
        ({"device": "mychip"}, "serves the device 'mychip', which is no type of torch's devices"),
        ({"device": 3}, "serves the device 3"),
        ({"words": fails}, "which is no set of names"),
        ({"words": "exp"}, "has as `words` 'exp', which is no set of names"),
        ({"words": {"exp", "tahn"}}, "has the word 'tahn', which is neither a primitive nor"),
        ({"device": "cpu:0"}, "serves the device 'cpu:0'"),
        ({"build": fails}, "has `build`, of a vendor that takes graphs, and `assemble`"),
    ],
)
def test_what_is_no_vendor_is_refused(instead: dict[str, Any], text: str) -> None:
    with pytest.raises(VendorError, match=re.escape(text)):
        require_whole(Faulty(**instead))


@pytest.mark.parametrize(("given", "meant"), [("compute_wide", "computes_wide"), ("layout_cost", "layout_costs")])
def test_a_name_that_reads_like_a_hook_is_refused(given: str, meant: str) -> None:
    with pytest.raises(VendorError, match=f"has '{given}', which dicp does not know: did you mean '{meant}'"):
        backend_for(Faulty(**{given: None}))
    backend_for(Faulty(**{f"_{given}": None}))  # private
    backend_for(Faulty(**{given: None, meant: fails}))  # beside the hook itself


def test_what_a_vendor_leaves_out_has_a_default() -> None:
    """Of one that inherits nothing, and of one that inherits the protocol, likewise."""

    class Inherits(toy.Toy, Vendor):
        pass

    for vendor in (toy.Toy(), Inherits(), Faulty(load=None, packs=None, begin=None)):
        whole = asked(vendor)
        assert not any(has(v, hook) for v in (vendor, whole) for hook in HOOKS.values() if callable(hook))
        assert whole.device_name(Config.make()) == "cpu" and whole.clock(Config.make()) is None
        assert whole.layout_costs == LayoutCosts() and whole.backend is None
        assert has(whole, Vendor.claim) and has(vendor, VendorBase.keeps)
        with pytest.raises(CacheError, match="toy loads no programs"):
            whole.load(b"", Config.make())
    with pytest.raises(VendorError, match="toy.claim failed"):
        asked(Faulty(claim=fails)).candidates(torch.fx.Graph().placeholder("x"), Config.make())


def test_half_a_vendor_that_inherits_is_refused() -> None:
    class Half(GraphVendor):
        name = "half"

        def supports(self, target: Any, node: Any) -> bool:
            return True

    with pytest.raises(VendorError, match="lacks device, available, keeps, fingerprint, build"):
        backend_for(Half())


def test_a_vendor_may_have_no_kernels_for_an_op() -> None:
    torch._dynamo.reset()
    some = Faulty(emits=lambda node: node.target is not torch.ops.aten.digamma.default)
    seen: list[Any] = []
    x = torch.rand(5) + 1
    with observe(seen.append):
        got = torch.compile(lambda x: x.digamma().exp(), backend=backend_for(some))(x)
    torch.testing.assert_close(got, x.digamma().exp())
    (program,) = (c.program for c in seen)
    assert [str(c.node.target) for c in program.externs] == ["aten.digamma.default"]
    assert len(program.launches) == 1


@by_example
def test_trains(example: Any) -> None:
    torch._dynamo.reset()
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 2)
    )
    x, y = r(5, 6), torch.tensor([0, 1, 1, 0, 1])
    F.cross_entropy(torch.compile(model, backend=example.backend)(x), y).backward()
    mine = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    torch.testing.assert_close(mine, [p.grad for p in model.parameters()], rtol=1e-4, atol=1e-5)


@by_example
def test_index_out_of_range(example: Any) -> None:
    torch._dynamo.reset()
    f = torch.compile(lambda w, i: F.embedding(i, w), backend=example.backend)
    with pytest.raises(IndexError, match=Path(__file__).name):
        f(r(9, 5), torch.tensor([9]))


@by_example
def test_the_check_that_failed_is_the_one_told(example: Any) -> None:
    """Of several kernels' checks, those of a kernel counted from its first."""
    torch._dynamo.reset()
    f = torch.compile(lambda w, i, j, n: ((w[i].exp() @ w.t())[:, j] + 1, i // n), backend=example.backend)
    w, at, bad, one = r(4, 4), torch.tensor([1, 3]), torch.tensor([1, 4]), torch.tensor([1, 2])
    torch.testing.assert_close(f(w, at, at, one), ((w[at].exp() @ w.t())[:, at] + 1, at // one))
    for i, j in ((bad, at), (at, bad)):
        with pytest.raises(IndexError):
            f(w, i, j, one)
    with pytest.raises(ZeroDivisionError):
        f(w, at, at, one - 1)


@by_example
def test_claims_become_library_calls_and_the_rest_kernels(example: Any) -> None:
    torch._dynamo.reset()
    found = []
    with observe(found.append):
        torch.compile(block, backend=example.backend)(r(4, 8), r(8, 8), r(8))
    (program,) = [c.program for c in found]
    assert [c.claim.name for c in program.library_calls] == ["mm"] and not program.externs  # addmm: mm, add
    kernels = program.sources["kernels.py" if example is toy else "kernels.c"]
    assert ("def " if example is toy else "for (") in kernels and "torch.mm(" in program.sources["call.py"]


def test_spells_every_primitive() -> None:
    """The word of each primitive names something torch has."""
    for op in UNARY | BINARY | TERNARY:
        word = toy.WORDS[op]
        if word.startswith("torch."):
            assert hasattr(torch, word.removeprefix("torch.").split("(")[0]), op
    assert toy.vendor.words >= UNARY | BINARY | TERNARY | KINDS


def test_loops_spell_what_c_has() -> None:
    lacking = {"digamma", "erfinv", "gcd", "lcm"}
    assert UNARY | BINARY | TERNARY == set(toy_loops.WORDS) | lacking
    assert toy_loops.ToyLoops.words == (UNARY | BINARY | TERNARY) - lacking | toy_loops.REDUCTIONS | {"scan"}


def test_what_a_mask_guards_is_in_a_branch() -> None:
    from lowered import compiled

    (launch,) = compiled(lambda x: F.pad(x, (1, 0)).exp(), (3,)).launches
    text = toy_loops.emit(launch.kernel, "k")
    assert text.index("if (") < text.index("= b0[") < text.index("exp(") and text.count("}") == 3, text


def test_values_come_before_the_stores_that_disturb_them() -> None:
    """Each input is written with what the other held."""

    def swap(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        kept = x.clone()
        x.copy_(y + 1)
        y.copy_(kept * 2)
        return x.sum()

    torch._dynamo.reset()
    x, y = r(5), r(5)
    mine, theirs = (x.clone(), y.clone()), (x.clone(), y.clone())
    got = torch.compile(swap, backend=toy_loops.backend)(*mine)
    torch.testing.assert_close((got, *mine), (swap(*theirs), *theirs))


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert toy_loops.vendor.available(None) is None
    monkeypatch.setenv("CC", "no-such-cc -m64")
    assert toy_loops.compiler()[0] in ("cc", "gcc")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "install gcc" in toy_loops.vendor.available(None)


def test_what_the_compiler_refuses_is_told() -> None:
    with pytest.raises(BuildError, match="refused the kernels"):
        toy_loops.build("int k(", {})


def test_emitted_kernel_reads_like_the_kernel() -> None:
    from lowered import compiled

    (launch,) = compiled(lambda x: x.exp().sum(1), (4, 8)).launches
    assert toy.emit(launch.kernel, "k") == textwrap.dedent("""\
        def k(b0, b1, messages):
            (i0, i1,) = grid(4, 8, )
            v0 = load(b0, 8*i0 + 1*i1).to(torch.float32)
            v1 = torch.exp(v0)
            (r0,) = reduce(1, v1.expand(4, 8, ), 'sum')
            store(b1, 1*i0, r0, (4, 8, ), 'set')
        """)


def test_masked_and_rounded_values_have_a_spelling() -> None:
    x = Expr("load", ("b0", 0), torch.float32)
    assert (
        toy.spelled(Expr("round", (x, torch.bfloat16), torch.float32), {x: "v0"})
        == "v0.to(torch.bfloat16).to(torch.float32)"
    )


def installed(folder: Path, *more: str) -> dict[str, str]:
    """An environment in which a package `toy` with entry points is installed; more: further vendors of it."""
    (folder / "toy").mkdir()
    (folder / "toy" / "__init__.py").write_text(render("toy")["toy/__init__.py"])
    info = folder / "toy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "\n".join(["[dicp.vendors]", "toy = toy:vendor", *more]) + "\n\n[torch_dynamo_backends]\ntoy = toy:backend\n"
    )
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


def test_packages_that_are_no_vendors_and_one_more_for_the_cpu(tmp_path: Path) -> None:
    """What ships with dicp comes first, and nothing else of theirs is in the way."""
    code = """
        from dicp import info, vendor
        from dicp.errors import VendorError
        assert vendor.for_device("cpu").name == "cpu_graph"
        found = info.collect()["vendors"]
        assert found["acme"] == "ready", found
        assert "of the package toy) cannot be loaded: ModuleNotFoundError" in found["boom"], found
        assert "the class Toy, not an object of it" in found["aclass"], found
        try:
            vendor.get("boom")
        except VendorError as error:
            assert "no_such_module:vendor" in str(error)
        try:
            vendor.for_device("tpu")
        except Exception as error:
            assert "acme (cpu)" in str(error), error
        print("found")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=installed(tmp_path, "acme = toy:vendor", "boom = no_such_module:vendor", "aclass = toy:Toy"),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.split()[-1:] == ["found"], done.stderr


def test_two_packages_with_vendors_of_one_name_are_refused(tmp_path: Path) -> None:
    """Whichever is found first would otherwise compile, silently."""
    code = """
        from dicp import info, scaffold, vendor
        from dicp.errors import OptionError, VendorError
        from pathlib import Path
        assert "is in two packages" in info.collect()["vendors"]["toy"]
        try:
            vendor.get("toy")
        except VendorError as error:
            assert "toy:vendor, of the package toy" in str(error), error
            assert "other:vendor, of the package other" in str(error), error
        assert vendor.for_device("cpu").name == "cpu_graph"
        import torch, toy
        try:
            torch.compile(lambda x: x + 1, backend=toy.backend)(torch.ones(3))
            raise AssertionError("compiled by one of them")
        except torch._dynamo.exc.BackendCompilerFailed as error:
            assert "is in two packages" in str(error), error
        try:
            scaffold.write("cpu_graph", Path("nowhere"))
        except OptionError as error:
            print("refused" if "there is a vendor 'cpu_graph' already" in str(error) else error)
    """
    env = installed(tmp_path)
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[dicp.vendors]\ntoy = other:vendor\n")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.split()[-1:] == ["refused"], done.stderr


def test_installed_package_is_found_by_its_entry_points(tmp_path: Path) -> None:
    code = """
        import torch
        assert "toy" in torch.compiler.list_backends()
        from dicp import vendor
        assert vendor.names() == sorted({*vendor.names(), "cpu_graph", "toy"}), vendor.names()
        assert vendor.get("toy").available(None) is None
        x = torch.randn(3, 5)
        f = torch.compile(lambda x: x.softmax(1), backend="toy", options={"strict": True})
        assert torch.allclose(f(x), x.softmax(1))
        import dicp
        assert dicp.backend("toy") is dicp.backend("toy")
        torch._dynamo.reset()
        f = torch.compile(lambda x: x.softmax(1), backend=dicp.backend("toy"), options={"strict": True})
        assert torch.allclose(f(x), x.softmax(1))
        try:
            dicp.backend("toi")
        except dicp.errors.DicpError as error:
            assert "did you mean 'toy'" in str(error)
        try:
            torch._dynamo.reset()
            torch.compile(lambda x: x + 1, backend="toy", options={"stric": True})(x)
        except Exception as error:
            assert "did you mean 'strict'" in str(error)
        print("found")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=installed(tmp_path),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout == "found\n", done.stderr


class Absent(toy.Toy):
    def available(self, config: Any) -> str | None:
        return "plug it in"


def test_a_vendor_that_cannot_run_says_so() -> None:
    torch._dynamo.reset()
    with pytest.raises(Exception, match="toy cannot run here: plug it in"):
        torch.compile(lambda x: x + 1, backend=dicp.backend(Absent()))(r(3))


def test_config_reaches_the_vendor() -> None:
    with pytest.raises(Exception, match="did you mean 'strict'"):
        torch.compile(lambda x: x + 1, backend=toy.backend, options={"stric": True})(r(3))
    assert Config.make("default", None).strict is False

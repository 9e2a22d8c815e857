"""The harness itself: what it must find, what it must let pass, and that it survives what it tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dicp.conformance import __main__ as command
from dicp.conformance import cases, docs, expected, grades, opdb, plan, tolerance
from dicp.conformance.outcome import Outcome, Reference
from dicp.conformance.report import Report, build, by_dtype, text, way_of
from dicp.conformance.unit import CaseResult, UnitResult, promised_strides, run_group, same_fault

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def conformance(*args: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run the command line tool with the toy backend at hand."""
    return subprocess.run(
        [sys.executable, "-m", "dicp.conformance", *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{HERE}"},
    )


# ---- the accuracy rule ----


def f32(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def test_one_ulp_passes_and_many_do_not() -> None:
    ref = torch.tensor([1.1, 2.2, 3.3], dtype=torch.float64)
    eager = ref.float()
    near = torch.nextafter(eager, f32(9, 9, 9))
    assert tolerance.judge(near, eager, ref, "elementwise") is None
    assert tolerance.judge(eager + 1e-5, eager, ref, "elementwise") is not None


def test_twice_eager_passes_and_ten_times_does_not() -> None:
    ref = torch.tensor([1.0, 2.0], dtype=torch.float64)
    eager, double, tenfold = (ref.float() * (1 + k * 3e-6) for k in (1, 1.9, 10))
    assert tolerance.judge(double, eager, ref, "elementwise") is None
    assert tolerance.judge(tenfold, eager, ref, "elementwise") is not None


def test_one_bad_element_among_many_fails() -> None:
    ref = torch.rand(100_000, dtype=torch.float64)
    eager = ref.float()
    actual = eager.clone()
    actual[77_777] += 0.01
    for kind in ("elementwise", "accumulating"):
        assert tolerance.judge(actual, eager, ref, kind) is not None  # type: ignore[arg-type]


def test_nan_and_infinity_must_be_of_one_class() -> None:
    ref = torch.tensor([float("nan"), float("inf"), 1.0], dtype=torch.float64)
    eager = ref.float()
    assert tolerance.judge(eager.clone(), eager, ref, "elementwise") is None
    assert tolerance.judge(f32(0, float("inf"), 1), eager, ref, "elementwise") is not None
    assert tolerance.judge(f32(float("nan"), -float("inf"), 1), eager, ref, "elementwise") is not None


def test_staying_finite_where_eager_overflowed_passes() -> None:
    ref = torch.tensor([300.0], dtype=torch.float64)
    eager = torch.tensor([float("inf")], dtype=torch.float16)
    assert tolerance.judge(ref.half(), eager, ref, "elementwise") is None


def test_integers_are_exact() -> None:
    eager = torch.tensor([1, 2, 3])
    assert tolerance.judge(torch.tensor([1, 2, 4]), eager, eager, "elementwise") is not None


def test_a_jump_is_no_conditioning() -> None:
    ref, eager, actual = torch.tensor([2.0], dtype=torch.float64), f32(2.0), f32(1.0)
    assert tolerance.judge(actual, eager, ref, "elementwise", lambda: torch.tensor([1.0]), 2.0) is not None


def test_cancellation_is_conditioning() -> None:
    ref, eager = torch.tensor([1e-6], dtype=torch.float64), f32(1e-6)
    actual = f32(1e-6 + 1e-7)
    assert tolerance.judge(actual, eager, ref, "accumulating") is not None
    assert (
        tolerance.judge(
            actual, eager, ref, "accumulating", lambda: torch.tensor([2e-7], dtype=torch.float64), 1.0
        )
        is None
    )


# ---- cases ----


def test_layouts_keep_values_and_change_memory() -> None:
    x = torch.arange(24.0).reshape(2, 3, 2, 2)
    for name, relay in cases.LAYOUTS.items():
        y = relay(x)
        assert y is not None and y.shape == x.shape
        assert name == "expanded" or torch.equal(x, y)
        assert y.stride() != x.stride() or y.storage_offset() == 1 or y.is_neg()
        again = cases.copy_exactly(y)
        assert again.stride() == y.stride() and torch.equal(again, y) and again.data_ptr() != y.data_ptr()
        assert again.is_neg() == y.is_neg()
    z = torch.randn(3, 4, dtype=torch.complex64)
    conjugated = cases.marked(z)
    assert conjugated is not None and conjugated.is_conj() and torch.equal(conjugated, z)
    assert cases.copy_exactly(conjugated).is_conj()


def test_grown_tensors_keep_equal_sizes_equal() -> None:
    case = cases.Case("s0", (cases.Slot(0), cases.Slot(1)), {}, (torch.rand(5, 1, 3), torch.rand(3, 5).t()))
    grown = cases.resized(case)
    assert grown is not None
    assert [tuple(t.shape) for t in grown] == [(6, 1, 4), (6, 4)] and grown[1].stride() == (1, 6)


def test_call_source_is_python() -> None:
    args, kwargs, tensors = cases.take_tensors(
        (torch.rand(2), [1, float("inf")], slice(0, None)), {"dtype": torch.float32}
    )
    constants: dict[str, object] = {}
    text = cases.call_source(cases.Case("s0", args, kwargs, tensors), constants, lambda i: f"t[{i}]")
    assert text == "t[0], [1, float('inf')], slice(0, None, None), dtype=torch.float32" and not constants


def test_every_operator_is_planned_and_has_a_category() -> None:
    units = plan.Plan(dynamic=True, gradient=True).units()
    planned = {u.op for u in units}
    able = {o.name for o in opdb.operators().values() if o.dtypes}
    assert planned == able and len(units) > 5000
    assert all(grades.category_of(o) for o in opdb.operators().values())


def test_a_run_of_no_operator_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    """Names with commas between them are no regular expression."""
    assert command.main(["--vendor", "cpu_graph", "--ops", "softmax,log_softmax"]) == 2
    assert "softmax,log_softmax" in capsys.readouterr().err
    assert command.main(["--ops", "^neg$", "--list", "--shard", "500/500"]) == 0


def test_shards_are_a_partition() -> None:
    whole = plan.Plan(ops="^a").units()
    parts = [u for i in (1, 2, 3) for u in plan.Plan(ops="^a", shard=(i, 3)).units()]
    assert sorted(u.key for u in parts) == sorted(u.key for u in whole)


def test_graded_operators_exist_and_unmapped_rows_give_reasons() -> None:
    # the first is not in the database of torch 2.11 and 2.12, the others are not in that of 2.14
    known = {*opdb.operators(), "native_group_norm", "cholesky", "qr"}
    assert all(set(row.operators) <= known for row in grades.rows())
    assert all(row.reason for row in grades.unmapped())
    assert len(grades.rows()) == 321


def test_ways() -> None:
    good = [CaseResult("s0", "pass")]
    assert way_of(UnitResult("k", good, graphs=1, kernels=1)) == "generated"
    assert way_of(UnitResult("k", good, graphs=1, kernels=1, library=1)) == "library"
    assert way_of(UnitResult("k", good, graphs=1, library=1, extern=1)) == "extern"
    assert way_of(UnitResult("k", good)) == "eager"
    assert way_of(UnitResult("k", [CaseResult("s0", "fail")], graphs=1)) == "fails"


def test_an_operator_counts_once_in_each_dtype() -> None:
    """By its weakest unit there: what a vendor of few dtypes does with those is to be seen."""
    good = [CaseResult("s0", "pass")]
    units = [
        UnitResult("add|float32|forward|static", good, graphs=1, kernels=1),
        UnitResult("add|float32|gradient|static", good, graphs=1, library=1),
        UnitResult("add|int64|forward|static", good, graphs=1, extern=1),
        UnitResult("mul|float32|forward|static", good, graphs=1, kernels=1),
    ]
    built = build("b", units, 0)
    assert by_dtype(built.operators) == {"float32": {"generated": 1, "library": 1}, "int64": {"extern": 1}}
    table = text(built).partition("once in each dtype")[2].splitlines()[1:3]
    assert [line.split()[0] for line in table] == ["float32", "int64"] and "100.0%" in table[0]


def test_an_expected_failure_is_of_a_kind_of_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = frozenset({"float32|gradient|static"})
    monkeypatch.setattr(expected, "EXPECTED_FAILURES", {"b": {"add": {kinds: "why"}}})

    def built(status: str, key: str) -> Report:
        return build("b", [UnitResult(key, [CaseResult("s0", status)], graphs=1)], 0)

    assert (
        built("pass", "add|float32|forward|static").ok and not built("fail", "add|float32|forward|static").ok
    )
    assert built("fail", "add|float32|gradient|static").ok
    assert built("pass", "add|float32|gradient|static").unexpected_passes


def test_upstream_is_the_same_fault_not_any() -> None:
    def fault(check: str, message: str) -> CaseResult:
        return CaseResult("s0", "fail", check, message)

    for check, one, other, same in (
        (
            "error",
            "RuntimeError: u0 <= 10 fails (a.py:3 f)",
            "(not isolated) RuntimeError: u1 <= 100 fails (a.py:5 f)",
            True,
        ),
        ("error", "RuntimeError: u0 <= 10", "InductorError: no kernel", False),
        (
            "stride",
            "result 0: compiled (5, 1), eager (0, 1)",
            "result 0: compiled (5, 1), eager (0, 1)",
            True,
        ),
        (
            "stride",
            "result 0: compiled (1, 5), eager (0, 1)",
            "result 0: compiled (5, 1), eager (0, 1)",
            False,
        ),
        ("value", "at (0,): compiled 3.9061, eager 3", "at (0,): compiled 3.9062, eager 3", True),
        ("value", "at (0,): compiled -3.9, eager 3", "at (0,): compiled 3.9, eager 3", False),
        ("value", "at (0,): compiled nan, eager 3", "at (0,): compiled 7.0, eager 3", False),
    ):
        assert same_fault(fault(check, one), fault(check, other)) == same, (one, other)
    assert not same_fault(fault("value", "x"), fault("mutation", "x"))


def test_what_fails_in_place_says_nothing_of_the_other_form() -> None:
    class Refuses:
        op = opdb.find("sin")

        def compiled(self, group: list[cases.Case]) -> list[Outcome]:
            if any(c.inplace for c in group):
                raise RuntimeError("no writes")
            return [Outcome("*", (), ()) for _ in group]

        def judge(self, *_: object) -> None:
            return None

    group = [cases.Case(f"s{i}", (), {}, (), inplace=2 <= i < 9) for i in range(16)]
    found = run_group(Refuses(), [(c, Outcome("*", (), ())) for c in group])  # type: ignore[arg-type]
    assert {r.id for r in found if r.status == "fail"} == {c.id for c in group if c.inplace}
    assert len(found) == 16 and any("not isolated" in r.message for r in found)


def test_promised_strides_take_their_sizes_from_the_result() -> None:
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        found = mode.from_tensor(torch.ones(4), static_shapes=True).nonzero().new_empty_strided
        size = mode.from_tensor(torch.ones(4), static_shapes=True).nonzero().shape[0]
        fake = found((5, size), (size, 1))
    assert promised_strides([fake], [torch.empty(5, 3)]) == [(3, 1)]


def test_eagers_luck_is_no_yardstick() -> None:
    """The gradient of a normalisation of two values cancels: what is left of it is rounding, in eager too."""
    op = opdb.find("_native_batch_norm_legit")
    x, one = torch.tensor([[1.3], [4.1]], requires_grad=True), torch.ones(1)
    args, kwargs, tensors = cases.take_tensors((x, one, one, one, one, True, 0.5, 1e-5), {})
    reference = Reference(op, cases.Case("s0", args, kwargs, tensors), True, lambda: [*tensors], 1234)
    exact = reference._part(0, "grads", 0, x.shape)
    assert exact is not None
    for far, passes in ((1e-7, True), (1e-5, False)):
        found = reference.judge((exact + far).float(), exact.float(), "grads", 0, "accumulating")
        assert (found is None) == passes, found


def test_the_reference_of_elementwise_operators_is_not_of_eagers_vectors() -> None:
    """fp64 stands for its own reference; eager's vectorised fmod is NaN where the quotient is huge."""
    x, y = torch.full((16,), 1e300, dtype=torch.float64), torch.full((16,), 0.5, dtype=torch.float64)
    args, kwargs, tensors = cases.take_tensors((x, y), {})
    case = cases.Case("s0", args, kwargs, tensors)
    reference = Reference(opdb.find("fmod"), case, False, lambda: [*tensors], 1234)
    eager = torch.fmod(x, y)
    assert reference.judge(torch.zeros_like(x), eager, "leaves", 0, "elementwise") is None
    assert reference.judge(torch.ones_like(x), eager, "leaves", 0, "elementwise")


def test_special_functions_are_measured_by_all_digits() -> None:
    """Eager's fp64 trigamma has nine, and is no reference for one that has sixteen."""
    x = torch.tensor([1.1349221457529257], dtype=torch.float64)
    args, kwargs, tensors = cases.take_tensors((x, 1), {})
    case = cases.Case("s0", args, kwargs, tensors)
    op = opdb.find("polygamma.polygamma_n_1")
    reference = Reference(op, case, False, lambda: [*tensors], 1234)
    eager = torch.polygamma(1, x)
    exact = torch.tensor([1.3709382736650408], dtype=torch.float64)
    assert reference.judge(exact, eager, "leaves", 0, "elementwise") is None
    assert reference.judge(eager + 3 * (eager - exact), eager, "leaves", 0, "elementwise")


# ---- the page ----


def test_operators_page_is_current() -> None:
    assert (ROOT / "docs" / "operators.md").read_text() == docs.render(
        docs.read_coverage(), docs.read_extent()
    ), "docs/operators.md is stale: run python -m dicp.conformance docs"


def test_coverage_lists_every_operator() -> None:
    listed = {r["operator"] for r in docs.read_coverage()}
    missing = {o.name for o in opdb.operators().values() if o.dtypes} - listed
    if not listed:
        pytest.skip("no whole run recorded yet")
    # Newer torch versions add operators; the recorded run is of one version.
    assert len(missing) < 30, sorted(missing)


# ---- faults ----


@pytest.fixture(scope="module")
def toy_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The toy backend's run over operators it breaks, each in another way."""
    folder = tmp_path_factory.mktemp("toy")
    command = [
        "--backend",
        "toy",
        "--import",
        "toy_backends",
        "--workers",
        "2",
        "--timeout",
        "8",
        "--samples",
        "1",
        "--dtypes",
        "float32",
        "--ops",
        "^(add|sin|exp|cos|erf|ceil|tan|asinh|mul|gather|take)$",
        "--resume",
        str(folder),
        "--json",
        str(folder / "r.json"),
        "--html",
        str(folder / "r.html"),
        "--junit",
        str(folder / "r.xml"),
    ]
    return folder, conformance(*command)


def test_faults_are_found_and_named(toy_run: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = toy_run
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads((folder / "r.json").read_text())
    checks: dict[str, set[str]] = {}
    for f in report["failures"]:
        if f["status"] == "fail":
            checks.setdefault(f["operator"], set()).add(f["check"])
    assert checks == {
        "add": {"value"},
        "exp": {"stride"},
        "cos": {"error"},
        "erf": {"crash"},
        "ceil": {"hang"},
        "tan": {"crash"},
        "gather": {"refusal"},
    }
    (crash,) = {f["message"] for f in report["failures"] if f["operator"] == "erf"}
    assert crash.startswith("the process ended with signal SIGABRT\n  ") and "in _crash" in crash
    lost = {f["operator"]: f["status"] for f in report["failures"] if "the device was lost" in f["message"]}
    assert lost == {"tan": "fail", "asinh": "upstream"}, "eager's own losses are not the backend's"
    how = {o["name"]: o["how"] for o in report["operators"]}
    assert how["mul"] != "fails" and how["sin"] != "fails" and how["add"] == "fails"
    assert how["take"] != "fails", "which checks its indices"


def test_reports_are_well_formed(toy_run: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = toy_run
    suites = ElementTree.parse(folder / "r.xml").getroot()
    names = {"add", "sin", "exp", "cos", "erf", "ceil", "tan", "asinh", "mul", "gather", "take"}
    assert {s.get("name") for s in suites} == names
    page = (folder / "r.html").read_text()
    assert "{{" not in page and page.count("<script>") == page.count("</script>") == 1
    assert "FAILED" in done.stdout and "by grade" in done.stdout


def test_a_run_that_nobody_resumes_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    few = ["--ops", "^mul$", "--dtypes", "float32", "--samples", "1", "--workers", "1"]
    assert command.main(["--backend", "aot_eager", *few]) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_run_resumes(toy_run: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, _ = toy_run
    lines = (folder / "results.jsonl").read_text().splitlines()
    # As a kill leaves it: the last line cut.
    (folder / "results.jsonl").write_text(
        "\n".join([*(x for x in lines if '"mul|' not in x), lines[0][:40]]) + "\n"
    )
    again = conformance(
        "--backend",
        "toy",
        "--import",
        "toy_backends",
        "--workers",
        "1",
        "--samples",
        "1",
        "--dtypes",
        "float32",
        "--ops",
        "^(add|sin|exp|cos|erf|ceil|tan|asinh|mul|gather|take)$",
        "--resume",
        str(folder),
    )
    assert again.returncode == 1 and "1/1 units" not in again.stderr.replace("mul|", "")
    keys = [
        json.loads(x)["key"] for x in (folder / "results.jsonl").read_text().splitlines() if x.endswith("}")
    ]
    assert keys.count("mul|float32|forward|static") == 1 and keys.count("erf|float32|forward|static") == 1


def test_results_of_two_backends_do_not_mix(toy_run: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, _ = toy_run
    done = conformance("--backend", "aot_eager", "--ops", "^mul$", "--resume", str(folder))
    assert done.returncode != 0 and "other settings" in done.stderr


# ---- the fuzzer ----


def test_fuzzer_finds_and_shrinks(tmp_path: Path) -> None:
    done = conformance(
        "fuzz",
        "--backend",
        "toy",
        "--import",
        "toy_backends",
        "--seconds",
        "25",
        "--seed",
        "3",
        "--workers",
        "2",
        "--timeout",
        "10",
        "--output",
        str(tmp_path),
        timeout=280,
    )
    assert done.returncode == 1, done.stdout
    scripts = sorted(tmp_path.glob("value_*.py"))
    assert scripts, done.stdout
    # Its smallest form is one addition.
    assert any(1 <= p.read_text().count("    v") <= 2 for p in scripts), [p.read_text() for p in scripts]


def test_programs_are_reproducible() -> None:
    from dicp.conformance.fuzz_generate import generate

    assert all(generate(k).source() == generate(k).source() for k in range(20))


def test_programs_are_of_every_kind() -> None:
    """A fuzzer finds what it makes."""
    from dicp.conformance.fuzz_generate import RULES, generate

    programs = [generate(k) for k in range(400)]
    rules = {s.rule for p in programs for s in p.body}
    assert {r.name for r in RULES} <= rules
    inputs = [i for p in programs for i in p.inputs]
    assert {"complex64", "complex128", "float32", "bfloat16"} <= {i.dtype for i in inputs if i.requires_grad}
    assert ("complex64", "conjugated") in {(i.dtype, i.layout) for i in inputs}


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided", "expanded", "negated", "conjugated"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool", "complex64"])
def test_written_inputs_are_the_inputs(layout: str, dtype: str) -> None:
    from dicp.conformance.fuzz_program import Input

    for shape in ((), (3,), (2, 3, 4)):
        i = Input("x0", shape, dtype, layout, requires_grad=dtype in ("float32", "complex64"))
        made, written = i.make(7), eval(i.source(7), {"torch": torch})
        assert torch.equal(made, written) and made.stride() == written.stride()
        assert (made.is_conj(), made.is_neg()) == (written.is_conj(), written.is_neg())
        assert (made.dtype, made.requires_grad) == (written.dtype, written.requires_grad)
        assert made.is_conj() is (layout == "conjugated" and dtype == "complex64")
        assert layout != "negated" or not made.is_complex() or (made != 0).all()


def test_strides_are_those_that_torch_promises() -> None:
    """Its fake indexing ignores in what order the indices lie, and data is behind a graph break."""
    from dicp.conformance.fuzz_program import Input, Program, Statement, differs, function, inputs_of, run

    where = Statement("v0", "torch.nonzero({0})", ("x0",), False, "ranked")
    taken = Statement("v1", "{1}[..., {0} % 3]", ("v0", "x0"), False, "index")
    p = Program(1, (Input("x0", (5, 3), "int64"),), (where, taken), ("v0", "v1"), False, False)
    eager = run(function(p.source()), p, inputs_of(p))
    (v0, v1), *rest = eager
    promised = v1.contiguous()
    assert promised.stride() != v1.stride()
    assert differs(p, False, eager, ([v0, promised], *rest)) is None
    found = differs(p, False, eager, ([v0.contiguous(), promised], *rest))
    assert found is not None and found.kind == "metadata"


def test_rounding_moves_complex_numbers_by_their_size() -> None:
    """A product of complex numbers rounds its small part by eps of the large one."""
    from dicp.conformance.fuzz_program import Input, Program, Statement, reference

    square = Statement("v0", "{0} * {0}", ("x0",), True, "complex_binary")
    p = Program(1, (Input("x0", (64,), "complex64"),), (square,), ("v0",), False, False)
    args = [torch.full((64,), 1 + 1j, dtype=torch.complex64)]
    exact, moved = (reference(p, args, {"v0": torch.complex64}, k) for k in (0, 1))
    assert exact is not None and moved is not None
    assert exact[0][0].dtype == torch.complex128
    off = (moved[0][0] - exact[0][0]) / 2
    for part in (off.real.abs(), off.imag.abs()):
        torch.testing.assert_close(part, torch.full_like(part, torch.finfo(torch.complex64).eps))


def test_what_is_written_may_be_rounded_too() -> None:
    """In float32, whatever is read of it as float64 later."""
    from dicp.conformance.fuzz_program import Input, Program, Statement, differs, function, inputs_of, run

    write = Statement(None, "{0}.tanh_()", ("x0",), True, "write")
    read = Statement("v0", "{0}.to(torch.float64)", ("x0",), True, "cast")
    p = Program(1, (Input("x0", (3,), "float32"),), (write, read), ("v0",), False, False)
    eager = run(function(p.source()), p, inputs_of(p))
    (v0,), grads, given = eager
    for off, found in ((1e-7, False), (1e-4, True)):
        assert (differs(p, False, eager, ([v0 * (1 + off)], grads, given)) is not None) is found


def test_second_sizes_are_small_too() -> None:
    """One of these once had inputs of 64^4 elements, and looked like a hang."""
    from dicp.conformance.fuzz_generate import LARGE, SMALL, generate

    for k in range(300):
        p = generate(904417000000 + k)
        if not p.dynamic:
            continue
        large = any(d not in SMALL.sizes for i in p.inputs for d in i.shape if d)
        assert all(torch.Size(s).numel() <= (LARGE if large else SMALL).largest for s in p.sizes2), p


def test_the_reference_copies_where_the_program_does() -> None:
    """In float64 `.to(torch.bfloat16)` would be its operand, and a write to it a write to the argument."""
    from dicp.conformance.fuzz_program import Input, Program, Statement, eager_dtypes, inputs_of, reference

    low = Statement("v0", "{0}.to(torch.bfloat16)", ("x0",), True, "cast")
    negate = Statement(None, "{0}.neg_()", ("v0",), False, "write")
    p = Program(
        1, (Input("x0", (3,), "float32", requires_grad=True),), (low, negate), ("v0", "x0"), False, True
    )
    (x,) = inputs_of(p)
    found = reference(p, [x], eager_dtypes(p, inputs_of(p)), 0)
    assert found is not None
    (v, kept), (grad,), _ = found
    assert torch.equal(v, -x.double()) and torch.equal(kept, x.double()) and grad is not None


def test_part_of_a_statement_may_be_rounded_too() -> None:
    """The scores of an attention are large, and a probability is as far off as they are: eps times their size."""
    from dicp.conformance.fuzz_program import Input, Program, Statement, reference

    text = "torch.softmax({rounded}({0} * 64), -1)"
    p = Program(
        1,
        (Input("x0", (3,), "float64"),),
        (Statement("v0", text, ("x0",), True, "matmul"),),
        ("v0",),
        False,
        False,
    )
    assert "v0 = torch.softmax((x0 * 64), -1)" in p.source()
    args = [torch.tensor([1.0, 1.001, 1.002], dtype=torch.float64)]
    exact, *moved = (reference(p, args, {"v0": torch.float64}, k) for k in range(6))
    assert exact is not None
    off = max(float((m[0][0] / exact[0][0] - 1).abs().max()) for m in moved if m is not None)
    assert 8 < off / torch.finfo(torch.float64).eps < 256


def test_gradients_are_those_of_the_arguments() -> None:
    """Eager lets an input need gradients once a tensor that does is written to it; AOTAutograd does not."""
    from dicp.conformance.fuzz_program import Input, Program, Statement, differs, inputs_of, run

    write = Statement(None, "{0}.mul_({1})", ("x0", "x1"), False, "write")
    result = Statement("v1", "{0} * 1.625", ("x1",), True, "unary")
    inputs = Input("x0", (3,), "float32"), Input("x1", (3,), "float32", requires_grad=True)
    p = Program(1, inputs, (write, result), ("v1",), False, True)
    space = {"torch": torch}
    exec(p.source(), space)
    values, gradients, arguments = run(space["f"], p, inputs_of(p))
    assert [g is None for g in gradients] == [True, False]
    found = differs(p, False, (values, gradients, arguments), (values, [None, None], arguments))
    assert found is not None and (found.kind, found.message) == ("gradient", "gradient 1: one is None")


def test_what_rounding_may_leave_of_a_cancelled_gradient_is_no_finding() -> None:
    """g - g is 0 when taken first, and a rounding of the large g when something is added between."""
    from dicp.conformance.fuzz_program import Input, Program, Statement, differs, inputs_of, run

    zero = Statement("v0", "torch.rsub({0}, {1})", ("x0", "x0"), True, "binary")
    norm = Statement("v1", "torch.nn.functional.layer_norm({0}, (3,))", ("v0",), True, "norm")
    more = Statement("v2", "{0} * 1.625", ("x0",), True, "unary")
    p = Program(
        1,
        (Input("x0", (1, 3), "float32", requires_grad=True),),
        (zero, norm, more),
        ("v1", "v2"),
        False,
        True,
    )
    space = {"torch": torch}
    exec(p.source(), space)
    values, (gradient,), arguments = run(space["f"], p, inputs_of(p))
    assert gradient is not None
    for off, found in ((4e-6, False), (4e-2, True)):
        got = (values, [gradient + off], arguments)
        assert (differs(p, False, (values, [gradient], arguments), got) is not None) is found


def test_a_sum_in_fp64_may_err_as_the_reference_does() -> None:
    from dicp.conformance.fuzz_program import Input, Program, Statement, reference

    total = Statement("v0", "{0}.sum()", ("x0",), True, "reduction")
    p = Program(1, (Input("x0", (64, 64), "float64"),), (total,), ("v0",), False, False)
    args = [torch.ones(64, 64, dtype=torch.float64)]
    runs = [reference(p, args, {"v0": torch.float64}, k) for k in (0, 1)]
    assert runs[0] is not None and runs[1] is not None
    moved = abs(float(runs[1][0][0] - runs[0][0][0])) / 4096
    assert moved / torch.finfo(torch.float64).eps == pytest.approx(64, rel=0.02)


@pytest.mark.skipif(
    torch.__version__.startswith("2.11"), reason="torch 2.11 copies that gradient right: there is no finding"
)
def test_a_finding_is_upstreams_only_where_its_results_are_ours() -> None:
    """AOTAutograd copies the gradient of a result whose elements overlap into memory that overlaps, too."""
    from torch._dynamo.backends.common import aot_autograd

    from dicp.conformance.fuzz import check, upstream
    from dicp.conformance.fuzz_program import Input, Program, Statement

    def doubling(gm: torch.fx.GraphModule, inputs: object) -> object:
        def backward(g: torch.fx.GraphModule, _: object) -> object:
            return lambda *args: [x if x is None else 2 * x for x in g(*args)]

        return aot_autograd(fw_compiler=lambda g, _: g, bw_compiler=backward)(gm, inputs)

    double = Statement("v0", "{0} * 2", ("x0",), True, "unary")
    windows = Statement("v1", "{0}.unfold(-1, 2, 1)", ("v0",), False, "view")
    p = Program(
        1, (Input("x0", (3,), "float32", requires_grad=True),), (double, windows), ("v1",), False, True
    )
    for backend, same in (("cpugraph", True), (doubling, False)):
        found = check(p, backend)  # type: ignore[arg-type]
        assert found is not None and found[0].kind == "gradient", "torch does it right: find another example"
        assert upstream(p, backend, *found) == same  # type: ignore[arg-type]


def test_a_finding_is_upstreams_whatever_rounding_does_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One result is wrong in `aot_eager` alike; of the other, each backend's rounding is its own."""
    from dicp.conformance import fuzz_program
    from dicp.conformance.fuzz import upstream
    from dicp.conformance.fuzz_program import Finding, Input, Program, Statement

    body = tuple(Statement(f"v{k}", "{0}.exp()", ("x0",), True, "unary") for k in range(2))
    p = Program(1, (Input("x0", (3,), "float32", requires_grad=False),), body, ("v0", "v1"), False, False)
    exact = torch.linspace(1, 2, 3).exp()
    wrong, above, below = exact + 1, exact * 1.03, exact * 0.98
    results = {
        "eager": [exact, above],
        "aot_eager": [wrong, above],
        "mine": [wrong, below],
        "other": [wrong + 1, below],
    }
    monkeypatch.setattr(torch, "compile", lambda fn, backend, dynamic: backend)
    monkeypatch.setattr(fuzz_program, "function", lambda source: "eager")
    monkeypatch.setattr(fuzz_program, "run", lambda name, p, inputs: (results[name], [], []))
    monkeypatch.setattr(fuzz_program, "reference", lambda *_: ([exact.double()] * 2, [], []))
    monkeypatch.setattr(fuzz_program, "eager_dtypes", lambda *_: {})
    finding = Finding("value", "of the first result")
    assert upstream(p, "mine", finding, False)
    assert not upstream(p, "other", finding, False)


def test_a_finding_is_upstreams_where_each_result_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two results, of which `aot_eager` gets one wrong, and raises where the other is there as well."""
    from dicp.conformance import fuzz
    from dicp.conformance.fuzz_program import Finding, Input, Program, Statement

    body = tuple(Statement(f"v{k}", "{0} + 1", ("x0",), True, "unary") for k in range(2))
    p = Program(1, (Input("x0", (3,), "float32"),), body, ("v0", "v1"), False, False)
    wrong, raised = Finding("value", "wrong", 0), Finding("error", "raises")
    both, first, second = ("v0", "v1"), ("v0",), ("v1",)
    found: dict[tuple[str, tuple[str, ...]], Finding] = {
        ("mine", both): wrong,
        ("aot_eager", both): raised,
        ("mine", first): wrong,
        ("aot_eager", first): wrong,
    }

    def check(q: Program, backend: str) -> object:
        at = found.get((backend, q.outputs))
        return None if at is None else (at, False)

    def whole(q: Program, backend: str, finding: Finding, sizes: bool) -> bool:
        return found.get(("aot_eager", q.outputs)) == finding

    monkeypatch.setattr(fuzz, "check", check)
    monkeypatch.setattr(fuzz, "_upstream_whole", whole)
    assert fuzz.upstream(p, "mine", wrong, False)
    found["mine", second] = wrong
    assert not fuzz.upstream(p, "mine", wrong, False)
    found["aot_eager", second] = wrong
    assert fuzz.upstream(p, "mine", wrong, False)
    del found["aot_eager", first]
    assert not fuzz.upstream(p, "mine", wrong, False)


def test_wide_slice_has_all_operators_of_cis() -> None:
    """What `run_test_op.sh wide` runs: over 5,000 cases, a dozen to a unit."""
    from ci_slice import ci_units, operators

    from dicp.conformance.plan import Plan

    units = Plan(operators(), ("float32", "bfloat16", "int64"), gradient=True, samples=3).units()
    assert {u.op for u in units} == {u.op for u in ci_units()}
    assert len(units) > 400


def test_a_view_that_is_none_as_traced_is_upstreams() -> None:
    """Where torch's fake indexing lays a result otherwise than eager does, one flattens it by a view, the other
    by a copy, and a later write to it is seen in one of them; aot_eager cannot run that at all."""
    from dicp.conformance.fuzz import check, upstream
    from dicp.conformance.fuzz_program import Input, Program, Statement, misled

    taken = Statement("v0", "{0}[{1} % 2]", ("x0", "x1"), False, "index")
    flat = Statement("v1", "{0}.conj().flatten()", ("v0",), False, "view")
    written = Statement(None, "{0}.imag.copy_({0}.real)", ("v0",), True, "write")
    indices = Input("x1", (2, 2), "int64", "transposed")
    p = Program(5, (Input("x0", (2,), "complex64"), indices), (taken, flat, written), ("v1",), False, False)
    assert misled(p, False)
    found = check(p, "dicp_cpu")
    assert found is not None and upstream(p, "dicp_cpu", *found)
    straight = replace(p, inputs=(p.inputs[0], replace(indices, layout="contiguous")))
    assert not misled(straight, False)


def test_rounding_of_a_write_is_in_what_its_gradient_reads() -> None:
    """tanh_ keeps its result for its gradient: noise behind the write leaves that there is a gradient."""
    from dicp.conformance.fuzz_program import Input, Program, Statement, reference

    sine = Statement("v0", "torch.sin({0})", ("x0",), True, "unary")
    written = Statement(None, "{0}.tanh_()", ("v0",), True, "write")
    p = Program(1, (Input("x0", (5,), "float32", requires_grad=True),), (sine, written), ("v0",), False, True)
    x = torch.linspace(-1, 1, 5).requires_grad_()
    plain, noisy = (reference(p, [x], {"v0": torch.float32}, seed) for seed in (0, 1))
    assert plain is not None and noisy is not None
    torch.testing.assert_close(noisy[1][0], plain[1][0], rtol=1e-5, atol=1e-6)
    assert not torch.equal(noisy[1][0], plain[1][0])


# -- a part of it, and where PyTorch is only used ------------------------------------------------------------


def test_a_run_of_some_seconds_is_spread_over_all_units() -> None:
    from dicp.conformance.__main__ import _until

    units: list[Any] = list(range(100))
    taken = list(_until(units, time.perf_counter() + 60))
    assert sorted(taken) == units and taken[:3] == [0, 29, 58]
    assert not list(_until(units, time.perf_counter() - 1))


def test_the_database_needs_no_expecttest() -> None:
    code = """
import importlib.util as util, sys
find = util.find_spec
util.find_spec = lambda name, *rest: None if name == "expecttest" else find(name, *rest)
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == "expecttest":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
from dicp.conformance import opdb
assert len(opdb.operators()) > 500 and "expecttest" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (["--ops", "("], "no regular expression"),
        (["--ops", "^sin$", "--dtypes", "float33"], "no such dtype: 'float33'"),
        (["--ops", "^sin$", "--import", "no_such_module"], "no_such_module"),
        (["--ops", "^sin$", "--report"], "--resume DIR"),
    ],
)
def test_wrong_options_are_one_line(wrong: list[str], text: str) -> None:
    with pytest.raises(SystemExit) as stop:
        command.main(wrong)
    assert text in str(stop.value) and "\n" not in str(stop.value)


def test_a_case_that_is_not_there_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--ops", "^sin$", "--dtypes", "float32", "--case", "s99"]) == 2
    assert "no case s99" in capsys.readouterr().out


def test_without_a_gpu_the_vendor_that_needs_one_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run = ["--vendor", "cuda_graph", "--ops", "^exp$", "--dtypes", "float32", "--samples", "1"]
    monkeypatch.delenv("DICP_CUDA_INTERPRET", raising=False)
    with pytest.raises(SystemExit, match="DICP_CUDA_INTERPRET=1"):
        command.main(run)
    monkeypatch.setenv("DICP_CUDA_INTERPRET", "1")
    assert command.main(run) == 0

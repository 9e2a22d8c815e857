"""From unit results to what people and machines read: text, JSON, JUnit. The HTML page is page.py's."""

from __future__ import annotations

import csv
import functools
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from . import expected, grades, opdb
from .unit import CaseResult, UnitResult

WAYS = ("generated", "library", "extern", "eager", "fails")


@dataclass
class Failure:
    """One case that fails. status: fail (counts against the run), xfail (in the table), upstream (aot_eager
    fails alike).
    """

    operator: str
    dtype: str
    unit: str
    case: str
    status: str
    check: str
    message: str
    call: str


@dataclass
class OperatorReport:
    """Everything a run learnt about one operator.

    how: the weakest way any of its real-dtype units went: generated < library < extern < eager (no graph
    reached the backend) < fails; how_complex: the same over complex dtypes; inductor: the same for Inductor,
    see inductor.csv; ways: the weakest way by dtype.
    """

    name: str
    category: str
    grade: str
    how: str = ""
    how_complex: str = ""
    inductor: str = ""
    dtypes: list[str] = field(default_factory=list)
    ways: dict[str, str] = field(default_factory=dict)
    passed: int = 0
    failed: int = 0
    xfailed: int = 0
    upstream: int = 0
    skipped: int = 0
    ms: float = 0.0
    kernels: int = 0
    externs: dict[str, int] = field(default_factory=dict)


@dataclass
class Report:
    """A whole run."""

    backend: str
    torch: str
    operators: list[OperatorReport]
    failures: list[Failure]
    unexpected_passes: list[str]
    errors: list[str]
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Nothing fails that is not in the table, nothing in the table passes, and every unit ran."""
        return (
            not self.unexpected_passes and not self.errors and all(f.status != "fail" for f in self.failures)
        )

    def count(self, what: str) -> int:
        """Total over operators of `passed`, `failed`, `xfailed`, `upstream` or `skipped`."""
        return sum(getattr(o, what) for o in self.operators)


@functools.cache
def inductor_ways() -> dict[str, str]:
    """operator -> generated | library | fallback | fails, as measured once on Inductor (scripted by
    `inductor.py`).
    """
    path = Path(__file__).parent / "inductor.csv"
    if not path.exists():
        return {}
    with path.open(newline="") as f:
        return {r["operator"]: r["how"] for r in csv.DictReader(f)}


def way_of(result: UnitResult) -> str:
    """How one unit went."""
    if any(c.status == "fail" for c in result.cases) or result.error:
        return "fails"
    if result.extern:
        return "extern"
    if result.library:
        return "library"
    return "generated" if result.graphs else "eager"


def _weakest(ways: Iterable[str]) -> str:
    found = set(ways)
    return max(found, key=WAYS.index) if found else ""


def build(backend: str, results: Sequence[UnitResult], seconds: float, device: str = "cpu") -> Report:
    """Group the units of a run by operator, and hold its failures against the table of expected ones."""
    import torch

    by_operator: dict[str, list[UnitResult]] = {}
    for r in results:
        by_operator.setdefault(r.key.split("|")[0], []).append(r)
    report = Report(backend, torch.__version__, [], [], [], [], seconds)
    failing: set[tuple[str, str]] = set()
    for name, units in sorted(by_operator.items()):
        report.operators.append(_operator(report, failing, opdb.find(name, device), units))
    ran = {
        (r.key.split("|")[0], expected.kind_of(r.key))
        for r in results
        if any(c.status != "skip" for c in r.cases)
    }
    for op, kinds, reason in expected.entries(backend):
        for kind in sorted(kinds):
            if (op, kind) in ran and (op, kind) not in failing:
                report.unexpected_passes.append(
                    f"{op} {kind}: every case passes; remove its entry ({reason})"
                )
    return report


def _operator(
    report: Report, failing: set[tuple[str, str]], op: opdb.Operator, units: list[UnitResult]
) -> OperatorReport:
    out = OperatorReport(
        op.name, grades.category_of(op), grades.grade_of(op.name), inductor=inductor_ways().get(op.name, "")
    )
    ways: dict[bool, list[str]] = {False: [], True: []}
    for unit in units:
        dtype = unit.key.split("|")[1]
        if dtype not in out.dtypes:
            out.dtypes.append(dtype)
        kind = expected.kind_of(unit.key)
        reason = expected.reason_for(report.backend, op.name, kind)
        for case in unit.cases:
            if case.status == "fail":
                failing.add((op.name, kind))
                case.status = "fail" if reason is None else "xfail"
            if case.status in ("fail", "xfail", "upstream"):
                report.failures.append(_failure(op.name, dtype, unit.key, case))
        n = Counter(c.status for c in unit.cases)
        out.passed, out.failed, out.skipped = (
            out.passed + n["pass"],
            out.failed + n["fail"],
            out.skipped + n["skip"],
        )
        out.xfailed, out.upstream = out.xfailed + n["xfail"], out.upstream + n["upstream"]
        out.ms, out.kernels = out.ms + unit.ms, out.kernels + unit.kernels
        for name, calls in unit.externs.items():
            out.externs[name] = out.externs.get(name, 0) + calls
        if unit.error:
            report.errors.append(f"{unit.key}: {unit.error}")
        if n["pass"] or n["fail"] or n["xfail"]:
            way = "fails" if n["xfail"] else way_of(unit)
            ways["complex" in dtype].append(way)
            out.ways[dtype] = _weakest((way, out.ways.get(dtype, way)))
    out.how, out.how_complex = _weakest(ways[False]), _weakest(ways[True])
    return out


def _failure(op: str, dtype: str, unit: str, case: CaseResult) -> Failure:
    return Failure(op, dtype, unit, case.id, case.status, case.check, case.message, case.call)


# ---- text ----


def tally(operators: Sequence[OperatorReport], key: str) -> dict[str, Counter[str]]:
    """Ways per category or per grade: {"P0": {"generated": 120, ...}}."""
    table: dict[str, Counter[str]] = {}
    for o in operators:
        table.setdefault(getattr(o, key), Counter())[o.how or o.how_complex or "skipped"] += 1
    return dict(sorted(table.items()))


def by_dtype(operators: Sequence[OperatorReport]) -> dict[str, Counter[str]]:
    """Ways per dtype: what a vendor of few dtypes covers of those."""
    table: dict[str, Counter[str]] = {}
    for o in operators:
        for dtype, way in o.ways.items():
            table.setdefault(dtype, Counter())[way] += 1
    return dict(sorted(table.items()))


def _table(title: str, table: dict[str, Counter[str]]) -> list[str]:
    columns = (*WAYS, "skipped")
    lines = [f"{title:24}" + "".join(f"{c:>11}" for c in columns) + f"{'covered':>9}"]
    for name, n in table.items():
        total = sum(n[c] for c in columns if c != "skipped")
        share = f"{100 * (n['generated'] + n['library']) / total:.1f}%" if total else "."
        lines.append(f"{name:24}" + "".join(f"{n[c] or '.':>11}" for c in columns) + f"{share:>9}")
    return lines


def beside_inductor(operators: Sequence[OperatorReport]) -> tuple[int, int]:
    """Of the operators Inductor compiles without a fallback: (those this run compiled without extern,
    all).
    """
    theirs = [o for o in operators if o.inductor in ("generated", "library") and o.how]
    return sum(o.how in ("generated", "library") for o in theirs), len(theirs)


def text(report: Report, verbose: bool = False) -> str:
    """The report for a terminal."""
    lines = [
        f"backend {report.backend}, torch {report.torch}, {len(report.operators)} operators, "
        f"{report.seconds:.0f} s",
        f"cases: {report.count('passed')} pass, {report.count('failed')} fail, "
        f"{report.count('xfailed')} expected failures, {report.count('upstream')} fail in aot_eager too, "
        f"{report.count('skipped')} refused by eager",
        "",
    ]
    lines += _table("by grade", tally(report.operators, "grade")) + [""]
    lines += _table("by category", tally(report.operators, "category")) + [""]
    lines += _table("once in each dtype", by_dtype(report.operators)) + [""]
    mine, theirs = beside_inductor(report.operators)
    if theirs:
        lines.append(
            f"of {theirs} operators that Inductor compiles without fallback, {mine} compile here without "
            f"extern ({100 * mine / theirs:.1f}%)"
        )
    externs: Counter[str] = Counter()
    for o in report.operators:
        externs.update(o.externs)
    if externs:
        lines += [
            "",
            "externs: " + ", ".join(f"{n} x{c}" for n, c in externs.most_common(None if verbose else 20)),
        ]
    listed = [f for f in report.failures if f.status == "fail" or verbose]
    shown = listed if verbose else _two_of_each(listed)[:60]
    for f in shown:
        lines += [f"{f.status.upper()} {f.unit} {f.case} [{f.check}] {f.call}", f"    {f.message}"]
    if len(shown) < len(listed):
        lines.append(f"... and {len(listed) - len(shown)} more (--verbose, --json or --html shows all)")
    lines += [f"UNEXPECTED PASS {line}" for line in report.unexpected_passes]
    lines += [f"ERROR {line}" for line in report.errors]
    lines.append("")
    lines.append("OK" if report.ok else "FAILED")
    return "\n".join(lines)


def _two_of_each(failures: list[Failure]) -> list[Failure]:
    """At most two per operator and check."""
    seen: Counter[tuple[str, str]] = Counter()
    kept = []
    for f in failures:
        seen[f.operator, f.check] += 1
        if seen[f.operator, f.check] <= 2:
            kept.append(f)
    return kept


# ---- machines ----


def to_json(report: Report) -> dict[str, Any]:
    """Plain data."""
    mine, theirs = beside_inductor(report.operators)
    return {
        **asdict(report),
        "ok": report.ok,
        "inductor_compiles": theirs,
        "of_those_without_extern": mine,
        "unmapped": [asdict(r) for r in grades.unmapped()],
    }


def write_json(report: Report, path: Path) -> None:
    """The report as one JSON file."""
    path.write_text(json.dumps(to_json(report), indent=1) + "\n")


def write_junit(report: Report, results: Sequence[UnitResult], path: Path) -> None:
    """One <testsuite> per operator, one <testcase> per case."""
    root = ElementTree.Element("testsuites", name=f"dicp.conformance {report.backend}")
    suites: dict[str, ElementTree.Element] = {}
    for unit in results:
        name = unit.key.split("|")[0]
        if name not in suites:
            suites[name] = ElementTree.SubElement(root, "testsuite", name=name)
        for case in unit.cases:
            node = ElementTree.SubElement(
                suites[name], "testcase", classname=unit.key.replace("|", "."), name=case.id
            )
            if case.status == "fail":
                ElementTree.SubElement(
                    node, "failure", type=case.check, message=_xml(case.message)
                ).text = _xml(case.call)
            elif case.status != "pass":
                ElementTree.SubElement(node, "skipped", message=_xml(f"{case.status}: {case.message}"))
    for suite in suites.values():
        suite.set("tests", str(len(suite)))
        suite.set("failures", str(sum(c.find("failure") is not None for c in suite)))
    ElementTree.ElementTree(root).write(path, encoding="unicode", xml_declaration=True)


def _xml(s: str) -> str:
    """Without the characters XML 1.0 cannot hold."""
    return "".join(c for c in s if c in "\t\n" or ord(c) >= 32)

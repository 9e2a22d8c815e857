"""The coverage table (`coverage.csv`, written by a whole run) and docs/operators.md, which is made of it.

python -m dicp.conformance docs [--check] [--output docs/operators.md]
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import grades
from .report import Report, beside_inductor, inductor_ways
from .unit import UnitResult

COVERAGE = Path(__file__).parent / "coverage.csv"
FIELDS = ("operator", "category", "grade", "how", "how_complex", "externs")
Row = dict[str, str]


def write_coverage(report: Report, results: Sequence[UnitResult], path: Path) -> None:
    """One line per operator: how it went on this run's backend; and, beside it as JSON, what was run."""
    kinds = Counter(
        " ".join(r.key.split("|")[1:]) for r in results if any(c.status != "skip" for c in r.cases)
    )
    mine, theirs = beside_inductor(report.operators)
    extent = {
        "torch": report.torch,
        **{k: report.count(k) for k in ("passed", "failed", "xfailed", "upstream", "skipped")},
        "without_extern": mine,
        "inductor_without_fallback": theirs,
        "units": dict(sorted(kinds.items())),
    }
    path.with_suffix(".json").write_text(json.dumps(extent, indent=1) + "\n")
    with path.open("w", newline="") as f:
        out = csv.writer(f, lineterminator="\n")
        out.writerow(FIELDS)
        for o in report.operators:
            out.writerow([o.name, o.category, o.grade, o.how, o.how_complex, " ".join(sorted(o.externs))])


def read_coverage(path: Path = COVERAGE) -> list[Row]:
    """The table as last measured; empty before the first whole run."""
    if not path.exists():
        return []
    with path.open(newline="") as f:
        return list(csv.DictReader(f))


def read_extent(path: Path = COVERAGE) -> dict[str, Any]:
    """What the recorded run consisted of; empty before the first one."""
    path = path.with_suffix(".json")
    return json.loads(path.read_text()) if path.exists() else {}  # type: ignore[no-any-return]


def _extent(run: dict[str, Any]) -> list[str]:
    if not run:
        return []
    modes: dict[str, list[str]] = {}
    for name, count in run["units"].items():
        dtype, _, mode = name.partition(" ")
        modes.setdefault(mode, []).append(f"{dtype} {count}")
    share = 100 * run["without_extern"] / max(run["inductor_without_fallback"], 1)
    return [
        f"torch {run['torch']}: {run['passed']:,} cases pass, {run['failed']} fail, {run['xfailed']} are "
        f"expected failures; {run['upstream']} fail under `aot_eager` alike, {run['skipped']} are refused "
        "by eager.",
        f"Of {run['inductor_without_fallback']} operators whose forward Inductor compiles without fallback, "
        f"{run['without_extern']} ({share:.1f} %) compile here without extern, gradients included where run.",
        "",
        "Operators run: " + "; ".join(f"{mode}: {', '.join(names)}" for mode, names in modes.items()) + ".",
        "",
    ]


def _summary(rows: Sequence[Row], key: str) -> list[str]:
    ways = ("generated", "library", "extern", "eager", "fails", "")
    lines = [
        f"| {key} | operators | generated | library | extern | eager | fails | skipped | covered "
        "| of those compiled |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name in sorted({r[key] for r in rows}):
        n = Counter(r["how"] or r["how_complex"] for r in rows if r[key] == name)
        total = n.total() - n[""]
        covered = n["generated"] + n["library"]
        shares = [f"{100 * covered / of:.1f} %" if of else "" for of in (total, total - n["eager"])]
        cells = [str(n[w] or "") for w in ways] + shares
        lines.append(f"| {name} | {n.total()} | {' | '.join(cells)} |")
    return lines


def render(rows: Sequence[Row], run: dict[str, Any] | None = None) -> str:
    """docs/operators.md."""
    theirs = inductor_ways()
    lines = [
        "# Operators",
        "",
        "Made by `python -m dicp.conformance docs` from the last recorded run on `dicp_cpu`; do not edit.",
        "What the words mean: [conformance.md](conformance.md). *Complex* is the same question for complex",
        "dtypes; *Inductor* is what Inductor does with the operator in its first real dtype on the CPU.",
        "*Covered* is the share of generated and library among all but the skipped; *of those compiled*",
        "leaves out `eager`, operators that Dynamo hands to no backend.",
        "",
    ]
    if not rows:
        return "\n".join([*lines, "No run has been recorded yet.", ""])
    lines += _extent(run or {})
    lines += [
        "## By grade",
        "",
        *_summary(rows, "grade"),
        "",
        "## By category",
        "",
        *_summary(rows, "category"),
        "",
    ]
    for category in sorted({r["category"] for r in rows}):
        lines += [
            f"## {category}",
            "",
            "| operator | grade | dicp_cpu | complex | Inductor | externs |",
            "|---|---|---|---|---|---|",
        ]
        for r in rows:
            if r["category"] == category:
                lines.append(
                    f"| `{r['operator']}` | {r['grade']} | {r['how']} | {r['how_complex']} | "
                    f"{theirs.get(r['operator'], '')} | {r['externs']} |"
                )
        lines.append("")
    lines += [
        "## Rows of the DeepLink list that no operator of the database stands for",
        "",
        "| grade | category | name | reason |",
        "|---|---|---|---|",
    ]
    lines += [f"| {u.grade} | {u.category} | {u.name} | {u.reason} |" for u in grades.unmapped()]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    """Write the page, or with --check say whether it is current."""
    p = argparse.ArgumentParser(prog="python -m dicp.conformance docs")
    p.add_argument("--output", type=Path, default=Path("docs/operators.md"))
    p.add_argument("--check", action="store_true")
    args = p.parse_args(argv)
    wanted = render(read_coverage(), read_extent())
    if args.check:
        current = args.output.exists() and args.output.read_text() == wanted
        print("current" if current else f"{args.output} is stale: run python -m dicp.conformance docs")
        return 0 if current else 1
    args.output.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

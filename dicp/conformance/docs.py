"""The coverage table (`coverage.csv`, written by a whole run) and docs/operators.md, which is made of it.

python -m dicp.conformance docs [--check] [--output docs/operators.md]
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from . import grades
from .report import Report, inductor_ways

COVERAGE = Path(__file__).parent / "coverage.csv"
FIELDS = ("operator", "category", "grade", "how", "how_complex", "externs")
Row = dict[str, str]


def write_coverage(report: Report, path: Path) -> None:
    """One line per operator: how it went on this run's backend."""
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


def _summary(rows: Sequence[Row], key: str) -> list[str]:
    ways = ("generated", "library", "extern", "eager", "fails", "")
    lines = [
        f"| {key} | operators | generated | library | extern | eager | fails | skipped | covered |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name in sorted({r[key] for r in rows}):
        n = Counter(r["how"] or r["how_complex"] for r in rows if r[key] == name)
        total = n.total() - n[""]
        share = 100 * (n["generated"] + n["library"]) / total if total else 100.0
        lines.append(
            f"| {name} | {n.total()} | " + " | ".join(str(n[w] or "") for w in ways) + f" | {share:.1f} % |"
        )
    return lines


def render(rows: Sequence[Row]) -> str:
    """docs/operators.md."""
    theirs = inductor_ways()
    lines = [
        "# Operators",
        "",
        "Made by `python -m dicp.conformance docs` from the last whole run on `dicp_cpu`; do not edit.",
        "What the words mean: [conformance.md](conformance.md). *Complex* is the same question for complex",
        "dtypes; *Inductor* is what Inductor does with the operator in its first real dtype on the CPU.",
        "",
    ]
    if not rows:
        return "\n".join([*lines, "No whole run has been recorded yet.", ""])
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
    wanted = render(read_coverage())
    if args.check:
        current = args.output.exists() and args.output.read_text() == wanted
        print("current" if current else f"{args.output} is stale: run python -m dicp.conformance docs")
        return 0 if current else 1
    args.output.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

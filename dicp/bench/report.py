"""Figures as text, Markdown and a picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dicp.bench import contestants

Row = dict[str, Any]
Results = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """Cells of text under a title; the first column names the row."""

    title: str
    heads: list[str]
    lines: list[list[str]]

    def text(self) -> str:
        rows = [self.heads, *self.lines]
        widths = [max(len(r[i]) for r in rows) for i in range(len(self.heads))]
        shown = [
            "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(r, widths))).rstrip()
            for r in rows
        ]
        return "\n".join([self.title, *shown]) + "\n"

    def markdown(self) -> str:
        rows = [self.heads, ["---", *["---:"] * (len(self.heads) - 1)], *self.lines]
        return f"**{self.title}**\n\n" + "\n".join("| " + " | ".join(r) + " |" for r in rows) + "\n"


def label(row: Row) -> str:
    """A row's name, unique among those of a run."""
    name = str(row["workload"]) + (" training" if row["phase"] == "training" else "")
    return f"{name} {row['dtype']}" + (" channels-last" if row.get("channels_last") else "")


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def figure(row: Row, name: str, key: str) -> float | None:
    """What was measured, or None: not measured, failed, or takes no part."""
    value = row["contestants"].get(name, {}).get(key)
    return None if value is None else float(value)


def best(row: Row, key: str, names: Sequence[str]) -> tuple[float, str] | None:
    """The least figure among these contestants, and whose it is."""
    found = [(value, name) for name in names if (value := figure(row, name, key)) is not None]
    return min(found) if found else None


def ratio(row: Row, key: str, names: Sequence[str], compilers: bool = False) -> float | None:
    """The best of the others over dicp's best: above 1, dicp is ahead. `compilers`: eager does not count."""
    mine = best(row, key, [n for n in names if contestants.get(n).is_dicp])
    peers = [
        n for n in names if not contestants.get(n).is_dicp and n not in (("eager",) if compilers else ())
    ]
    theirs = best(row, key, peers)
    return theirs[0] / mine[0] if mine and theirs and mine[0] > 0 else None


def geometric_mean(values: Sequence[float]) -> float | None:
    positive = [v for v in values if v > 0]
    return math.exp(sum(map(math.log, positive)) / len(positive)) if positive else None


def _names(rows: Sequence[Row], key: str) -> list[str]:
    """The contestants that have this figure, or failed at it, in their order."""
    seen: dict[str, None] = {}
    for row in rows:
        for name, found in row["contestants"].items():
            if key in found or "failed" in found:
                seen.setdefault(name)
    return list(seen)


def _cell(row: Row, name: str, key: str, digits: int) -> str:
    failed = "failed" in row["contestants"].get(name, {})
    return "failed" if failed else _number(figure(row, name, key), digits)


def _table(rows: list[Row], title: str, key: str, compilers: bool = False, digits: int = 2) -> Table | None:
    """A column for each contestant, and the ratio; the geometric mean of that last."""
    rows = [r for r in rows if any(key in found for found in r["contestants"].values())]
    names = _names(rows, key)
    if not rows or not names:
        return None
    ratios = [ratio(row, key, names, compilers) for row in rows]
    known = [r for r in ratios if r is not None]
    lines = [
        [
            label(row),
            *(_cell(row, n, key, digits) for n in names),
            *([f"{_number(r)}{' <' if r is not None and r < 1 else ''}"] if known else []),
        ]
        for row, r in zip(rows, ratios)
    ]
    if known:
        lines.append(["geometric mean", *[""] * len(names), _number(geometric_mean(known))])
    return Table(title, ["", *names, *(["best peer / dicp"] if known else [])], lines)


def _throughput(rows: list[Row]) -> Table | None:
    """What gets done in a second, and how fast the arithmetic and the weights go by at dicp's best."""
    rows = [r for r in rows if any("ms" in found for found in r["contestants"].values())]
    names = _names(rows, "ms")
    if not rows:
        return None
    lines = []
    for row in rows:
        times = [figure(row, n, "ms") for n in names]
        mine = best(row, "ms", [n for n in names if contestants.get(n).is_dicp]) or best(row, "ms", names)
        rates: list[float | None] = [None, None]
        if mine and "flops" in row:
            rates = [row["flops"] / mine[0] / 1e6, row["weight_bytes"] / mine[0] / 1e6]
        lines.append(
            [
                f"{label(row)}, {row['unit']}/s",
                *(_number(row["work"] * 1e3 / ms if ms else None, 1) for ms in times),
                *(_number(rate, 1) for rate in rates),
            ]
        )
    return Table(
        "Throughput", ["", *names, "GFLOP/s of products", "GB/s of weights"], lines
    )  # fmt: skip


def floor_ms(row: Row) -> float | None:
    """The time below which a call cannot take as many operations as written, or reads of its weights."""
    if "gflops" not in row or "flops" not in row:
        return None
    arithmetic, reading = row["flops"] / row["gflops"] / 1e6, row["weight_bytes"] / row["read_gb_per_s"] / 1e6
    return float(max(arithmetic, reading))


def _roofline(rows: list[Row]) -> Table | None:
    """How near dicp comes to what the machine can do, and how far ahead of its peers anyone could be."""
    lines, ahead = [], []
    for row in rows:
        floor = floor_ms(row)
        mine = best(row, "ms", [n for n in row["contestants"] if contestants.get(n).is_dicp])
        theirs = best(row, "ms", [n for n in row["contestants"] if not contestants.get(n).is_dicp])
        if floor is None or mine is None:
            continue
        possible = theirs[0] / floor if theirs else None
        ahead += [possible] if possible else []
        shown = (row["flops"] / 1e9, row["gflops"], row["read_gb_per_s"], floor, mine[0])
        lines.append(
            [label(row), *(_number(x, 1) for x in shown), f"{100 * floor / mine[0]:.0f} %", _number(possible)]
        )
    if not lines:
        return None
    if ahead:
        lines.append(["geometric mean", *[""] * 6, _number(geometric_mean(ahead))])
    heads = ["", "GFLOP", "GFLOP/s", "GB/s", "floor, ms", "dicp", "floor / dicp", "best peer / floor"]
    title = "Roofline: what the machine can do; the floor: products as written, or weights read once"
    return Table(title, heads, lines)


def _overhead(results: Results) -> Table | None:
    found = results.get("overhead")
    if not found:
        return None
    us = {n: f["us"] for n, f in found.items() if isinstance(f, dict) and "us" in f}
    return Table(
        "Per call, µs: three ops on 16 elements; 'nothing' is a backend that returns the graph as it is",
        ["", *us],
        [["three ops", *map(_number, us.values())]],
    )


def tables(results: Results) -> list[Table]:
    """All that was measured."""
    rows: list[Row] = results["rows"]
    found = [
        _table(rows, "Time of a call, ms (medians of alternating rounds in one process)", "ms"),
        _throughput(rows),
        _roofline(rows),
        _table(rows, "Cold compile, s (first call less a steady one; fresh process, empty caches)",
               "cold_s", compilers=True),
        _table(rows, "Warm compile, s (the same in a second process, with the caches that the first filled)",
               "warm_s", compilers=True),
        _table(rows, "dicp's own part of a cold compile, s (the rest: Dynamo and AOTAutograd)", "own_s"),
        _table(rows, "Peak memory, MB (growth of resident memory in a warm call, results included)",
               "peak_mb", digits=1),
        _overhead(results),
    ]  # fmt: skip
    return [t for t in found if t is not None]


def losses(results: Results) -> list[str]:
    """Where a peer is ahead of dicp, and what failed: a line each."""
    said = []
    what: tuple[tuple[str, str, bool], ...] = (
        ("ms", "ms", False), ("cold_s", "s cold compile", True), ("peak_mb", "MB peak", False)
    )  # fmt: skip
    for row in results["rows"]:
        names = list(row["contestants"])
        for key, unit, compilers in what:
            r = ratio(row, key, names, compilers)
            mine = best(row, key, [n for n in names if contestants.get(n).is_dicp])
            if r is None or r >= 1 or mine is None:
                continue
            peers = [n for n in names if not contestants.get(n).is_dicp and not (compilers and n == "eager")]
            theirs = best(row, key, peers)
            assert theirs is not None
            said.append(
                f"{label(row)}: {mine[1]} {mine[0]:.2f} {unit}, {theirs[1]} {theirs[0]:.2f} ({r:.2f}x)"
            )
        for name, found in row["contestants"].items():
            if "failed" in found:
                said.append(f"{label(row)}: {name} failed: {found['failed'].splitlines()[-1][:160]}")
    return said


def heading(results: Results) -> str:
    """The conditions, on one line."""
    return ", ".join(f"{k} {v}" for k, v in {**results["machine"], **results["settings"]}.items() if v)


def _whole(results: Results, show: Callable[[Table], str]) -> str:
    parts = [heading(results) + "\n", *map(show, tables(results))]
    lost = losses(results)
    parts += ["Behind a peer, or failed:\n", *(f"* {line}" for line in lost or ["nothing"])]
    return "\n".join(parts) + "\n"


def text(results: Results) -> str:
    """For a terminal."""
    return _whole(results, Table.text)


def markdown(results: Results) -> str:
    """For a page."""
    return _whole(results, Table.markdown)


def plot(results: Results, path: Path) -> str | None:
    """Speed over eager, a bar for each contestant, as PNG (or what the file's ending says). What is missing,
    if it cannot be drawn."""
    try:
        import matplotlib
    except ImportError:
        return "the plot needs matplotlib, which is not installed: pip install matplotlib"
    matplotlib.use("agg")
    from matplotlib import pyplot

    rows = [r for r in results["rows"] if figure(r, "eager", "ms")]
    names = [n for n in _names(rows, "ms") if n != "eager"]
    if not rows or not names:
        return "nothing to plot: it shows speed over eager, which needs eager's times and another's"
    height = 0.8 / len(names)
    drawing, axes = pyplot.subplots(figsize=(9, 1.5 + 0.2 * len(rows) * len(names)))
    for k, name in enumerate(names):
        ratios = [
            (figure(row, "eager", "ms") or 0) / ms if (ms := figure(row, name, "ms")) else 0 for row in rows
        ]
        places = [i + (k - (len(names) - 1) / 2) * height for i in range(len(rows))]
        axes.barh(places, ratios, height, label=name)
    axes.set_yticks(range(len(rows)), [label(r) for r in rows])
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("speed over eager")
    about = results["machine"]
    axes.set_title(f"{about.get('cpu')}, {about.get('threads')} threads", fontsize=9)
    axes.legend()
    drawing.tight_layout()
    drawing.savefig(path, dpi=120)
    pyplot.close(drawing)
    return None

"""What a compile shows of itself: one log line per graph, and every stage as text.

DICP_DEBUG    1 a line per graph   3 the graph after each pass that changed it   4 generated source   5
kernel IR
DICP_DUMP     a folder that receives 00_import.txt ... 50_memory.txt and the generated sources, per graph
TORCH_LOGS    "+dicp": the same lines as DICP_DEBUG=1 through torch's logging
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dicp.config import Config
from dicp.errors import OptionError
from dicp.ir.expr import texts
from dicp.ir.kernel import show as show_kernel
from dicp.ir.printer import show as show_graph
from dicp.schedule.defs import Call, Pointwise, Reduction
from dicp.schedule.kernels import Launch

log = logging.getLogger("dicp")


class Dump:
    """The observer of one compile; does nothing unless asked to."""

    def __init__(self, name: str, config: Config) -> None:
        self.name, self.config = name, config
        self.folder = Path(config.dump) / name if config.dump else None
        self.passes = 0
        if self.folder is not None:
            with self._writing():
                self.folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            what = f"nothing can be written to the folder {self.config.dump!r} of the option dump: {e}"
            raise OptionError(what, todo="name another in DICP_DUMP or options, or none") from e

    @property
    def on_pass(self) -> Callable[..., None] | None:
        return self._pass if self.folder is not None or self.config.debug >= 3 else None

    def graph(self, stage: str, gm: Any) -> None:
        self._text(stage, 3, lambda: show_graph(gm, locations=True))

    def _pass(self, name: str, gm: Any, changed: bool, seconds: float) -> None:
        self.passes += 1
        stage = f"{self.passes:02}_{name}"
        text = (lambda: show_graph(gm, locations=True)) if changed else (lambda: "(unchanged)")
        self._text(stage, 3, lambda: f"# {seconds * 1e3:.1f} ms\n{text()}")

    def definitions(self, stage: str, lowered: Any) -> None:
        self._text(stage, 5, lambda: "\n".join(map(_definition, lowered.defs)))

    def items(self, stage: str, items: list[Any]) -> None:
        self._text(stage, 5, lambda: "\n\n".join(_item(i) for i in items))

    def plan(self, stage: str, program: Any) -> None:
        self._text(stage, 5, lambda: plan_text(program))

    def sources(self, program: Any) -> None:
        for name, source in program.sources.items():
            self._text(name, 4, lambda source=source: source)  # type: ignore[misc]

    def done(self, compiled: Any) -> None:
        p = compiled.program
        line = (
            f"{compiled.name}: {len(p.launches)} kernels, {len(p.library_calls)} library calls, "
            f"{len(p.externs)} externs, arena {_bytes(p.plan.example_size)}, "
            f"{sum(compiled.seconds.values()):.2f} s ("
            + ", ".join(f"{k} {v:.2f}" for k, v in compiled.seconds.items())
            + ")"
        )
        say(line, self.config)

    def _text(self, stage: str, level: int, text: Callable[[], str]) -> None:
        if self.folder is None and self.config.debug < level:
            return
        body = text()
        if self.folder is not None:
            path = self.folder / (stage if "." in stage else f"{stage}.txt")
            with self._writing():
                path.write_text(body + "\n")
        if self.config.debug >= level:
            print(f"dicp: {self.name} {stage}\n{body}", file=sys.stderr)


def say(line: str, config: Config) -> None:
    """One line about a graph, to the log and under DICP_DEBUG=1 to stderr."""
    log.info("%s", line)
    if config.debug >= 1:
        print(f"dicp: {line}", file=sys.stderr)


def _bytes(n: Any) -> str:
    if not isinstance(n, int):
        return f"{n} bytes"
    return f"{n / 2**20:.1f} MiB" if n >= 2**20 else f"{n / 2**10:.1f} KiB"


def _definition(d: Any) -> str:
    outs = ", ".join(b.name for b in d.outputs if b is not None)
    if isinstance(d, Call):
        return f"{outs} = {'library' if d.claim else 'extern'} {d.node.target}    # {d.note}"
    *shared, value = texts(d.expr)
    if isinstance(d, Pointwise):
        line = f"{outs}{list(d.index)} = {value}"
    elif isinstance(d, Reduction):
        word = "scan" if d.scan else "reduce"
        line = f"{outs}{list(d.index)} = {word} {d.kind} over {list(d.rvars)} of {value}"
    else:
        line = f"{outs}{list(d.target)} {d.mode}= {value}"
    return "\n".join([*(f"  {s}" for s in shared), f"{line}    # {d.note}"])


def _item(item: Any) -> str:
    if isinstance(item, Launch):
        return show_kernel(item.kernel)
    assert isinstance(item, Call)
    return _definition(item)


def plan_text(program: Any) -> str:
    """The memory plan: every temporary with its offset, size and last use."""
    plan, buffers = program.plan, program.lowered.buffers
    symbolic = "" if isinstance(plan.size, int) else " at the sizes of the example"
    lines = [f"arena {_bytes(plan.example_size)}, most alive at once {_bytes(plan.lower_bound)}{symbolic}"]
    lines += [f"  {symbol.name} = max({', '.join(map(str, ends))})" for symbol, ends in plan.maxima.items()]
    for name, offset in plan.offset.items():
        lines.append(
            f"  {name}: at {offset}, {_bytes(buffers[name].nbytes)}, until step {plan.last_use.get(name)}"
        )
    lines += [
        f"  {name}: in {lender} at {offset}, {_bytes(buffers[name].nbytes)}, until step {plan.last_use[name]}"
        for name, (lender, offset) in plan.borrowed.items()
    ]
    lines += [
        f"  {name}: of its own, {_bytes(buffers[name].nbytes)}, step {first} to {plan.last_use[name]}"
        for name, first in plan.spilled.items()
    ]
    lines += [f"  {name}: in place of {root}" for name, root in plan.root.items()]
    return "\n".join(lines)

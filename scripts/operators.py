"""Single operators under eager PyTorch and dicp_cpu on one thread: milliseconds, forward and gradient.

    python scripts/operators.py [REGEX] [--group NAME] [--all]

The least of some 20 calls each, which take at most half a second together. At the end are listed those that
took more than 1.5 times eager's time and 0.1 ms more (guards take up to half of that), the worst first; --all
lists every one as it is measured. The cases are in scripts/operator_cases.py; "cl" means channels-last.
"""

from __future__ import annotations

import argparse
import functools
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from operator_cases import all_cases
from operator_inputs import Case

import dicp  # noqa: F401  (registers the backend where the package is not installed)

CALLS, SECONDS = 20, 0.5
BEHIND, NOISE = 1.5, 0.1  # times eager's time, and ms more, from which an operator is listed


@dataclass(frozen=True)
class Line:
    """Milliseconds of an operator, or of its gradient alone."""

    name: str
    eager: float
    dicp: float

    @property
    def behind(self) -> bool:
        return self.dicp > BEHIND * self.eager and self.dicp - self.eager > NOISE

    def __str__(self) -> str:
        return f"{self.name:36} {self.eager:9.3f} {self.dicp:9.3f} {self.dicp / self.eager:7.2f}"


def least(call: Callable[[], object]) -> float:
    """Milliseconds of the fastest call."""
    call()
    found: list[float] = []
    while len(found) < 3 or len(found) < CALLS and sum(found) < SECONDS:
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return 1e3 * min(found)


def measure(name: str, case: Case) -> Iterator[Line]:
    """A line for the operator, and one for its gradient where it has one."""
    torch.compiler.reset()
    torch.manual_seed(0)
    inputs = case.inputs()
    compiled = torch.compile(case.fn, backend="dicp_cpu", dynamic=False)
    with torch.no_grad():
        yield Line(name, *(least(lambda f=f: f(*inputs)) for f in (case.fn, compiled)))  # type: ignore[misc]
    if not case.gradient:
        return
    leaves = [x.requires_grad_() for x in inputs if x.is_floating_point()]
    times = []
    for fn in (case.fn, compiled):
        results = [y for y in _tensors(fn(*inputs)) if y.requires_grad]
        ones = [torch.ones_like(y) for y in results]
        times.append(
            least(functools.partial(torch.autograd.grad, results, leaves, ones, True, allow_unused=True))
        )
    yield Line(f"{name}, gradient", *times)


def _tensors(found: Any) -> list[torch.Tensor]:
    return [found] if isinstance(found, torch.Tensor) else list(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("regex", nargs="?", default="")
    parser.add_argument("--group", choices=list(all_cases()))
    parser.add_argument("--all", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    lines = []
    print(f"{'':36} {'eager':>9} {'dicp_cpu':>9} {'ratio':>7}")
    for group, cases in all_cases().items():
        for name, case in cases.items():
            if given.group in (None, group) and re.search(given.regex, name):
                for line in measure(name, case):
                    lines.append(line)
                    if given.all:
                        print(line, flush=True)
    behind = sorted((x for x in lines if x.behind), key=lambda x: x.eager / x.dicp)
    print(f"\n{len(lines)} measured; behind eager by more than {BEHIND} times and {NOISE} ms: {len(behind)}")
    for line in behind:
        print(line)


if __name__ == "__main__":
    main()

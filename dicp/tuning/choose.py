"""The algorithm chooser. For each call of a graph the vendor names candidates, its heuristic's choice first.

by default                 the heuristic's choice: the same call in every run, on every machine of the kind
    max_autotune               the one measured fastest here, once: the record is kept in the build cache
numerics="eager"           the call that eager makes
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch.fx as fx

from dicp.compat import real_tensors
from dicp.config import Config
from dicp.errors import DicpError, VendorError
from dicp.ir.printer import user_location
from dicp.runtime.cache import open_store
from dicp.tuning import timing
from dicp.tuning.costs import Costs, key_of, measured, recorded
from dicp.tuning.one_call import CompileOne, describe, one_call
from dicp.vendor.base import Claim, Vendor

log = logging.getLogger("dicp.tuning")

MARGIN = 0.95
"""What another candidate's time must be below, of that of the heuristic's choice: less is noise."""


def choose_claims(
    gm: fx.GraphModule, vendor: Vendor, config: Config, compile_one: CompileOne
) -> dict[fx.Node, Claim]:
    """The claim of each node that the vendor claims."""
    tuner = Tuner(vendor, config, compile_one) if config.max_autotune else None
    claims = {}
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        found = candidates(vendor, node, config)
        if found:
            claims[node] = found[0] if tuner is None or len(found) == 1 else tuner.choose(node, found)
    return claims


def candidates(vendor: Vendor, node: fx.Node, config: Config) -> Sequence[Claim]:
    """The vendor's claims for a node, its own choice first."""
    found = list(vendor.candidates(node, config) or ())
    for claim in found:
        if not isinstance(claim, Claim):
            raise VendorError(
                f"{vendor.name}.claim gave {claim!r} for {node.target}, where a Claim or None is due",
                where=user_location(node) or "",
            )
    return found


class Tuner:
    """Choices for one graph; calls that read alike are looked up once."""

    def __init__(self, vendor: Vendor, config: Config, compile_one: CompileOne) -> None:
        self.vendor, self.config, self.compile_one = vendor, config, compile_one
        self.store = open_store(config)
        self.costs: dict[str, Costs | None] = {}

    def choose(self, node: fx.Node, found: Sequence[Claim]) -> Claim:
        """The fastest; the first where nothing can be measured."""
        names = [claim.name for claim in found]
        call = describe(node)
        key = key_of(call, names, self.vendor.name, self._device(), self.vendor.machine(self.config).threads)
        if key.digest not in self.costs:
            self.costs[key.digest] = self._costs(node, found, key)
        costs = self.costs[key.digest]
        if costs is None or costs.choice not in names:
            return found[0]
        return found[names.index(costs.choice)]

    def _device(self) -> str:
        return str(self.vendor.device_name(self.config))

    def _costs(self, node: fx.Node, found: Sequence[Claim], key: Any) -> Costs | None:
        if self.config.no_compile:  # a candidate not built yet cannot be measured
            return recorded(self.store, key)
        try:
            costs = measured(self.store, key, functools.partial(self._measure, node, found))
        except (DicpError, RuntimeError, OSError) as e:
            log.warning("%s: not measured (%s)", key.parts["call"], e)
            return None
        log.info("%s: %s", key.parts["call"], costs.text())
        return costs

    def _measure(self, node: fx.Node, found: Sequence[Claim]) -> Costs:
        gm, call = one_call(node)
        with real_tensors():
            return self._timed(gm, call, found)

    def _timed(self, gm: fx.GraphModule, call: fx.Node, found: Sequence[Claim]) -> Costs:
        sets = timing.operand_sets(gm)
        runs: dict[str, timing.Run] = {}
        expected: Sequence[Any] = ()
        for claim in found:
            try:
                run = self.compile_one(gm, {call: claim})
                results = run(list(sets[0]))
                expected = expected or results
                alike = timing.agree(call, expected, results)
            except Exception as e:  # a vendor's code may raise anything
                log.info("%s of %s failed: %s", claim.name, call, str(e).partition("\n")[0])
                continue
            if alike:
                runs[claim.name] = run
            else:
                names = (claim.name, next(iter(runs)))
                log.warning("%s: %s gives other results than %s, and is left out", call.target, *names)
        if not runs:
            raise DicpError("no candidate could be run")
        clock = self.vendor.clock(self.config) or timing.on_host
        seconds = timing.time_calls(runs, sets, clock)
        return decided({c.name: seconds.get(c.name) for c in found})


def decided(seconds: dict[str, float | None]) -> Costs:
    """The choice between candidates in the heuristic's order; None: it failed."""
    known = {name: s for name, s in seconds.items() if s is not None}
    best = min(known, key=known.__getitem__)
    first = next(iter(seconds))
    if first in known and known[best] > MARGIN * known[first]:
        best = first
    return Costs({name: None if s is None else round(s * 1e6, 2) for name, s in seconds.items()}, best)

"""The graph passes, in order: each takes a verified FX graph and gives one that means the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch.fx import GraphModule, Node

from dicp.errors import DicpError, InternalError
from dicp.ir.meta_keys import LAYOUT_KEY
from dicp.ir.verify import verify
from dicp.passes.canonicalize import canonicalize
from dicp.passes.conv_matmul import rewrite_conv_matmul
from dicp.passes.inline_regions import inline_regions
from dicp.passes.layout import choose_layout
from dicp.passes.merged_sizes import repair_merged_sizes
from dicp.passes.pack import pack_weights
from dicp.passes.pad_channels import pad_channels
from dicp.passes.rewrite_attention import rewrite_attention
from dicp.passes.rewrite_complex import rewrite_complex
from dicp.passes.rewrite_conv import rewrite_conv
from dicp.passes.rewrite_conv1d import rewrite_conv1d
from dicp.passes.rewrite_dot import rewrite_dot
from dicp.passes.rewrite_dropout import rewrite_dropout
from dicp.passes.rewrite_few_channels import rewrite_few_channels
from dicp.passes.rewrite_linear import rewrite_linear
from dicp.passes.rewrite_linears import rewrite_linears
from dicp.passes.rewrite_norm import rewrite_norm
from dicp.passes.rewrite_scatter import rewrite_scatter
from dicp.passes.rewrite_separable import rewrite_separable
from dicp.passes.rewrite_whole_window import rewrite_whole_window
from dicp.passes.rng_states import open_rng_states
from dicp.passes.split_backward import split_backward
from dicp.passes.unfuse_bias import unfuse_bias
from dicp.passes.widen import widen
from dicp.vendor.base import VendorBase

__all__ = ["PASSES", "OnPass", "Pass", "run_passes"]


class PassConfig(Protocol):
    """What the passes read of the configuration."""

    @property
    def verify(self) -> bool: ...

    @property
    def layout(self) -> bool: ...

    @property
    def numerics(self) -> str: ...


class Pass(NamedTuple):
    """A named graph pass; `reason` says why it stands where it stands, `exact` whether each result keeps its
    bits, in low precision too. One that is not exact does not run under `numerics="eager"`."""

    name: str
    run: Callable[[GraphModule, VendorBase], GraphModule]
    reason: str
    exact: bool = False


class OnPass(Protocol):
    """Called after each pass: dumps and timings hang here."""

    def __call__(self, name: str, gm: GraphModule, changed: bool, seconds: float) -> None: ...


PASSES: tuple[Pass, ...] = (
    Pass("canonicalize", lambda gm, vendor: canonicalize(gm), "first: patterns then have one spelling", True),
    Pass("rewrite_complex", rewrite_complex, "before the rewrites of what is real then"),
    Pass("rewrite_dropout", lambda gm, vendor: rewrite_dropout(gm), "before what it would stop", True),
    Pass("rewrite_norm", lambda gm, vendor: rewrite_norm(gm), "any time after the first"),
    Pass("rewrite_scatter", rewrite_scatter, "any time after the first"),
    Pass("rewrite_attention", rewrite_attention, "before linear: the products inside are its own"),
    Pass("rewrite_dot", rewrite_dot, "after attention, which takes its own"),
    Pass("rewrite_conv1d", rewrite_conv1d, "before all that is for images"),
    Pass("rewrite_few_channels", rewrite_few_channels, "after 1-D ones; before what takes these products"),
    Pass("rewrite_whole_window", rewrite_whole_window, "after 1-D ones, before all that is for convolutions"),
    Pass("widen", widen, "after attention, which matches low precision; before the calls it would hide"),
    Pass("rewrite_conv", rewrite_conv, "before layout, which asks what is a convolution"),
    Pass("rewrite_separable", rewrite_separable, "after the convolutions that it is made of, before layout"),
    Pass("pad_channels", pad_channels, "after the convolutions; before layout, which orders what is padded"),
    Pass("rewrite_linear", rewrite_linear, "after attention, which takes the products inside it"),
    Pass("rewrite_linears", rewrite_linears, "after linear: it joins those calls"),
    Pass("unfuse_bias", unfuse_bias, "after linear, which takes biases whole"),
    Pass("clean_up", lambda gm, vendor: canonicalize(gm), "after the rewrites: views that met", True),
    Pass("choose_layout", choose_layout, "it counts what the rewrites left"),
    Pass("rewrite_conv_matmul", rewrite_conv_matmul, "after layout: rows are channels-last positions"),
    Pass("split_backward", split_backward, "after the products, which take some of the gradients"),
    Pass("pack_weights", pack_weights, "last: it asks how each call will be made"),
)


def run_passes(
    gm: GraphModule,
    vendor: VendorBase,
    config: PassConfig,
    on_pass: OnPass | None = None,
) -> GraphModule:
    """Run PASSES over the graph, verifying it before the first and after each where `config.verify`. The
    module's Python code stays that of the graph before: nobody runs it.

    Raises VerifyError (from the import, or naming the pass through `add_note`), InternalError where a pass
    raises another.
    """
    inline_regions(gm)
    open_rng_states(gm)  # not one of PASSES: before it the graph has nodes without a value
    repair_merged_sizes(gm)  # before anybody asks for a size
    if config.verify:
        verify(gm)
    before = _fingerprint(gm) if on_pass else []
    for entry in PASSES:
        if entry.run is choose_layout and not config.layout:
            continue
        if config.numerics == "eager" and not entry.exact:
            continue
        start = time.perf_counter()
        gm = _run(entry, gm, vendor)
        seconds = time.perf_counter() - start
        if config.verify:
            _verify_after(gm, entry.name)
        if on_pass:
            after = _fingerprint(gm)
            on_pass(entry.name, gm, after != before, seconds)
            before = after
    return gm


def _run(entry: Pass, gm: GraphModule, vendor: VendorBase) -> GraphModule:
    try:
        return entry.run(gm, vendor)
    except DicpError:
        raise
    except Exception as e:  # whatever a pass with a bug raises
        raise InternalError(f"the pass {entry.name} failed: {type(e).__name__}: {e}") from e


def _verify_after(gm: GraphModule, name: str) -> None:
    try:
        verify(gm)
    except Exception as error:
        error.add_note(f"after the pass {name}")
        raise


def _fingerprint(gm: GraphModule) -> list[Any]:
    """Equal for graphs of the same nodes; cheap, where printing both graphs would not be."""
    return [(n.name, n.target, _names(n), n.meta.get(LAYOUT_KEY)) for n in gm.graph.nodes]


def _names(node: Node) -> tuple[str, ...]:
    return tuple(n.name for n in node.all_input_nodes)

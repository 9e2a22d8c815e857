"""ReLU inside oneDNN's convolutions, where no sum can be NaN: its max(x, 0) is 0 of that.

A sum is at most the largest magnitude of the image times the magnitudes of a result's weights, added up.
That factor is kept with packed weights, so one number per image decides at each call: the bound that the
convolution left which made it, or, where there is none or it has grown too large, its largest magnitude.
Images with NaN, infinity or numbers near the largest are convolved without ReLU, which is then done in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx

from dicp.ops.conv_call import ConvCall, the_conv_call
from dicp.passes.freeze import is_constant
from dicp.schedule.defs import Call, View
from dicp.vendor.cpu_graph.claims.common import LIMITS, onednn_has
from dicp.vendor.cpu_graph.expression import STORAGE

TOPS = {act: LIMITS[act][1] for act in ("relu", "relu6")}
"""The activations, and what their results are at most."""

_UNKNOWN = "__builtin_inff()"
_SAFE = "1e38f"  # sums below it neither overflow nor are rounded to infinity
_ROUNDED = "1.01"  # more than what a sum and its rounding to a low precision add

_UNIT = """\
#include "dicp_rectified.h"
using namespace dicp;

DICP_EXPORT int32_t {name}_{word}({parameters}) {{
  return {name}({arguments});
}}
"""


def serves(node: fx.Node) -> bool:
    """Whether a dicp::conv with one of TOPS is made so: of images, by weights that are constant, which are
    packed (or are Winograd's, which has it inside itself)."""
    call, val = the_conv_call(node), node.meta["val"]
    if call.act not in TOPS or (call.other is not None and call.act != "relu"):  # oneDNN's sums know no other
        return False
    return val.dim() == 4 and onednn_has(val.dtype) and is_constant(call.weight)


def emit(w: Any, c: Call, act: str, convolve: Callable[[str], None]) -> None:
    """The call. convolve("none" or act): adds oneDNN's, with that inside."""
    call = the_conv_call(c.node, c.args)
    weight = call.weight
    packed = weight.buffer.kind == "packed"
    if not packed or not (act in TOPS or act == "none" and _feeds_convolutions(c)):
        convolve("none" if act in TOPS else act)
        if act in TOPS:
            _rectify(w, c, act)
        return
    sums = _sums(w, call, measured=act in TOPS)
    if act in TOPS:
        w.branch(f"{sums} < {_SAFE}", lambda: convolve(act), lambda: _apart(w, c, act, convolve))
    else:
        convolve(act)
    top = TOPS.get(act, _UNKNOWN)
    most = sums if top == _UNKNOWN else f"({sums} < {top} ? {sums} : {top})"
    w.lines.append(f"{_bound(w, c.outputs[0])} = {sums} < {_SAFE} ? {most} : {_UNKNOWN};")


def _feeds_convolutions(c: Call) -> bool:
    return any(user.target is torch.ops.dicp.conv.default for user in c.node.users)


def _sums(w: Any, call: ConvCall, measured: bool) -> str:
    """The variable with what no sum exceeds. measured: images may be read for it."""
    x, weight, bias, other = call.x, call.weight, call.bias, call.other
    sums, factor = w.fresh("sums"), f"((const double*){w.packed(weight)})[1]"
    bounds = {id(v): _bound(w, v.buffer) for v in (x, other) if v is not None}
    added = ""
    if bias is not None:
        most = w.fresh("most")
        w.lines.append(f"float {most};")
        _largest(w, bias, most)
        added = f" + {most}"
    if other is not None:
        added += f" + {bounds[id(other)]}"
    text = f"(float)({_ROUNDED} * ({factor} * {bounds[id(x)]}{added}))"
    w.lines.append(f"float {sums} = {text};")
    if measured:
        w.lines.append(f"if (!({sums} < {_SAFE})) {{")
        for v in (x, other):
            if v is not None:
                _largest(w, v, bounds[id(v)])
        w.lines += [f"{sums} = {text};", "}"]
    return str(sums)


def _bound(w: Any, buffer: Any) -> str:
    """The variable with a bound of a tensor's magnitudes; of an input, which may be written between calls,
    one of this call."""
    if buffer.kind == "input":
        variable = str(w.fresh("bound"))
        w.lines.append(f"float {variable} = {_UNKNOWN};")
        return variable
    variable = f"bound_{buffer.name}"
    if variable not in w.declared:
        w.declared.add(variable)
        w.hoisted.append(f"float {variable} = {_UNKNOWN};")
    return variable


def _apart(w: Any, c: Call, act: str, convolve: Callable[[str], None]) -> None:
    convolve("none")
    _rectify(w, c, act)


def _largest(w: Any, v: View, into: str) -> None:
    """Read the largest magnitude in a tensor's window on memory."""
    name = _function(w, v, "largest", "const {word}* x, int64_t n, float* found", "x, n, found")
    w.lines.append(f"{name}({w.pointer_to(v)}, {w.text(v.span)}, &{into});")


def _rectify(w: Any, c: Call, act: str) -> None:
    out = c.outputs[0]
    assert out is not None
    if w.is_over(c):
        data = w.pointer_to(the_conv_call(c.node, c.args).other)
    else:
        data = f"{out.name}_t.data<{STORAGE[out.dtype]}>()"
    rectify(w, View(out, out.shape, out.strides), data, act)


def rectify(w: Any, y: View, data: str, act: str) -> None:
    """One of TOPS in place, of a window on memory that begins at `data`."""
    name = _function(w, y, "rectify", "{word}* y, int64_t n, float top", "y, n, top")
    w.lines.append(f"{name}({data}, {w.text(y.span)}, {TOPS[act]});")


def _function(w: Any, v: View, name: str, parameters: str, arguments: str) -> str:
    word = STORAGE[v.buffer.dtype]
    parameters = parameters.format(word=word)
    unit = _UNIT.format(name=name, word=word, parameters=parameters, arguments=arguments)
    return str(w.template(f"{name}_{word}", parameters, unit))


__all__ = ["TOPS", "emit", "rectify", "serves"]

"""The private torch that dicp uses, behind names that stay the same for torch 2.11 to 2.14. Elsewhere there
are only its names of operators, pytrees and symbolic sizes."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import sympy
import torch
from torch._C._dynamo.guards import (  # type: ignore[attr-defined]
    _empty_strided_cpu,
    _empty_strided_cuda,
    _reinterpret_tensor,
)
from torch._guards import detect_fake_mode as _detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import in_kernel_invocation_manager as _in_kernel
from torch.autograd import forward_ad  # whose `_current_level` is not below 0 while a dual_level is open
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.experimental.symbolic_shapes import statically_known_true as _statically_known_true

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "e4m3_overflow",
    "fake_mode_of",
    "forward_ad",
    "known_equal",
    "known_true",
    "quiet_shapes",
    "size_hint",
]


def fake_mode_of(values: object) -> FakeTensorMode | None:
    """The fake tensor mode that made the fake tensors among `values` (a nested list), or the one active."""
    return _detect_fake_mode(values)


def shares_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors, fake ones too, have one storage."""
    return torch._C._is_alias_of(a, b)


def known_equal(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Whether the sizes are equal for every value of the symbols, found out without adding a guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    if not isinstance(a, int) and not isinstance(b, int) and a.node.expr == b.node.expr:
        return True  # the common cases, and much cheaper than asking
    if size_hint(a, -1) != size_hint(b, -1) and -1 not in (size_hint(a, -1), size_hint(b, -1)):
        return False
    return bool(_statically_known_true(a == b))


def known_true(condition: bool | torch.SymBool) -> bool:
    """Whether a condition on sizes holds for every value of the symbols, found out without adding a guard."""
    return bool(_statically_known_true(condition))


def size_hint(size: int | torch.SymInt, fallback: int = 128) -> int:
    """The size seen while tracing, for cost estimates only: taking it adds no guard."""
    if isinstance(size, int):
        return size
    node = size.node
    hint = node.hint if node.has_hint() else None
    jagged = isinstance(hint, torch.SymInt)  # stands for the lengths of all parts of a nested tensor
    return fallback if hint is None or jagged else int(hint)


def is_traced(size: int | torch.SymInt) -> bool:
    """Whether a size has a value while tracing; one read from data has none."""
    return isinstance(size, int) or size.node.has_hint()


def example_value(shapes: ShapeEnv | None, size: sympy.Expr, unknown: int) -> int:
    """What a size is at the inputs that were traced, sizes read from data counting as `unknown`."""
    values = {} if shapes is None else shapes.backed_var_to_val
    return int(size.xreplace({s: values.get(s, sympy.Integer(unknown)) for s in size.free_symbols}))


def symbolic_size(shapes: Any, size: sympy.Expr, value: int | None) -> torch.SymInt:
    """The size as torch has it. value: what it is at the inputs traced, None if it is read from data."""
    return shapes.create_symintnode(size, hint=value)  # type: ignore[return-value]


@contextmanager
def quiet_shapes(mode: FakeTensorMode) -> Iterator[None]:
    """Run fake operators so that they leave neither guards nor pending symbols behind."""
    with ExitStack() as stack:
        if mode.shape_env is not None:
            stack.enter_context(mode.shape_env.suppress_guards())
            stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
        yield


_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)


def quick_fake(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The fake result of a view or product of fake tensors of known sizes, by its C++ Meta kernel and nothing
    around it: a tenth of the time that torch's dispatch of fake tensors takes. None for other calls."""
    if not isinstance(op, torch._ops.OpOverload) or not (op.is_view or op in _PRODUCTS) or kwargs:
        return None
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    numbers = [n for a in args for n in (a if isinstance(a, (list, tuple)) else (a,))]
    if (
        not tensors
        or not all(type(t) is FakeTensor and _is_plain(t) for t in tensors)
        or len({(t.fake_mode, t.fake_device) for t in tensors}) != 1  # type: ignore[attr-defined]
        or any(isinstance(n, torch.SymInt) for n in numbers)
    ):
        return None
    mode, device = tensors[0].fake_mode, tensors[0].fake_device  # type: ignore[attr-defined]
    with _in_kernel(mode):
        found = op(*args)
    parts = found if isinstance(found, (list, tuple)) else [found]  # of a view that splits
    if not all(type(part) is torch.Tensor for part in parts):
        return None
    fakes = [FakeTensor(mode, part, device) for part in parts]
    return fakes[0] if parts is not found else type(found)(fakes)


def channels_last_fake(t: torch.Tensor) -> torch.Tensor | None:
    """A fake tensor like this one of known sizes, but channels-last; as quick as `quick_fake`. None for
    other tensors."""
    if type(t) is not FakeTensor or not _is_plain(t):
        return None
    with _in_kernel(t.fake_mode):
        laid_out = torch.empty(t.shape, dtype=t.dtype, device="meta", memory_format=torch.channels_last)
    return FakeTensor(t.fake_mode, laid_out, t.fake_device)


def _is_plain(t: torch.Tensor) -> bool:
    """Whether a fake tensor is an ordinary one of known sizes, of which no autograd graph is made."""
    return not (t._has_symbolic_sizes_strides or t.requires_grad or t.is_conj() or t.is_neg()) and (
        t.layout is torch.strided
    )


def rng_wrappers() -> tuple[Any, Any, Any]:
    """Calls around a random operator: that also gives the generator's state, that is made under a state
    given, and the one that is made under a generator which CUDA graphs know."""
    from torch._prims import rng_prims

    return (
        rng_prims.run_and_save_rng_state,
        rng_prims.run_with_rng_state,
        rng_prims.graphsafe_run_with_rng_state,
    )


@contextmanager
def real_tensors() -> Iterator[None]:
    """Run operators on data, inside a compile too, where fake tensors and tracers would take them over."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch.no_grad():
        yield


@functools.cache
def e4m3_overflow() -> int:
    """The byte that this torch makes of a number too large for float8_e4m3fn: the largest one, in earlier
    versions NaN."""
    with real_tensors():
        return int(torch.tensor([1e6]).to(torch.float8_e4m3fn).view(torch.uint8))


def promoted_dtypes(kind: str, *operands: object) -> tuple[torch.dtype, torch.dtype]:
    """The dtype torch computes an elementwise op in, and that of its result, for tensors and Python numbers.
    """
    from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as KINDS
    from torch._prims_common import elementwise_dtypes

    return elementwise_dtypes(*operands, type_promotion_kind=KINDS[kind])  # type: ignore[arg-type]


_Sizes = tuple[int, ...]
_Empty = Callable[[_Sizes, _Sizes, torch.dtype], torch.Tensor]
empty_strided_cpu: _Empty = _empty_strided_cpu
empty_strided_cuda: _Empty = _empty_strided_cuda
"""An uninitialised tensor (shape, strides, dtype) on the CPU, or on the current GPU, by torch's shortest way
to one."""


def tensors_from_handles(handles: Iterable[int]) -> list[torch.Tensor]:
    """The tensors behind handles of libtorch's C interface; takes the handles over."""
    import ctypes

    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    capsules = [new_capsule(handle, None, None) for handle in handles]
    # The function for one tensor leaves its handle, and with it the memory, behind.
    return torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(capsules)  # type: ignore[no-any-return]


def tensor_handle(t: torch.Tensor) -> int:
    """A new handle of libtorch's C interface on a tensor; `tensors_from_handles` takes it back."""
    import ctypes

    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    (capsule,) = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors([t])
    return pointer(capsule, None)  # type: ignore[no-any-return]


def memory_format(x: torch.Tensor) -> torch.memory_format:
    """What ATen's kernels take strides for: channels-last where they are those of images or of volumes."""
    from torch._prims_common import suggest_memory_format

    return suggest_memory_format(x)


def torch_decompositions() -> dict[object, Callable[..., object]]:
    """A copy of torch's own decompositions: the core set, and every other one that is registered."""
    from torch._decomp import decomposition_table

    return dict(decomposition_table)


def core_decompositions() -> set[object]:
    """Ops that torch itself decomposes on the way to its core set."""
    from torch._decomp import _core_aten_decompositions_post_autograd

    return set(_core_aten_decompositions_post_autograd())


def composite(op: torch._ops.OpOverload) -> Callable[..., object] | None:
    """What an op does in terms of others, for all devices; None for an op that is not defined so."""
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    if not op.has_kernel_for_dispatch_key(key):
        return None
    return functools.partial(op._op_dk, key)


def higher_order_name(target: Any) -> str | None:
    """The name under torch.ops.higher_order, None for anything else."""
    from torch._ops import HigherOrderOperator

    return target.name() if isinstance(target, HigherOrderOperator) else None


def counters() -> Any:
    """torch's counters of this backend: torch._dynamo.utils.counters["dicp"]."""
    from torch._dynamo.utils import counters as all_counters

    return all_counters["dicp"]


def trace_again() -> type[BaseException]:
    """What AOTAutograd raises to have Dynamo trace once more, without the symbols of numbers nothing uses."""
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis

    return TensorifyScalarRestartAnalysis


def goes_with_its_symbol(node: Any) -> bool:
    """Whether Dynamo leaves this call without users away when it traces again: its result is a tensor whose
    number had a symbol (OutputGraph.remove_tensorify_specialized_graphargs)."""
    from torch._dynamo.symbolic_convert import TensorifyState

    memo = getattr(node.meta.get("example_value"), "item_memo", None)
    name = getattr(getattr(getattr(memo, "node", None), "_expr", None), "name", None)
    return name is not None and TensorifyState.should_specialize(name)


def inputs_mutated_outside(graph: Any) -> set[Any]:
    """Placeholders of a forward graph whose new value is one of its results, which AOTAutograd copies to the
    input behind it."""
    output = graph.graph.output_node()
    mutated = [d.mutated_input for d in output.meta.get("desc", ()) if hasattr(d, "mutated_input")]
    return {n for n in graph.graph.nodes if n.op == "placeholder" and n.meta.get("desc") in mutated}


def maybe_mark_dynamic(t: torch.Tensor, d: int) -> None:
    """Have Dynamo make this size symbolic, unless the model needs it to be a number."""
    torch._dynamo.maybe_mark_dynamic(t, d)


def recompile_reason() -> str | None:
    """Which guard failed, and on which values, where Dynamo compiles a function again; else None."""
    from torch._dynamo.utils import get_metrics_context

    reason = getattr(get_metrics_context(), "_metrics", {}).get("recompile_reason")
    return None if reason is None else str(reason)


def compiled_frame() -> tuple[str, dict[str, Any]]:
    """The function that Dynamo is compiling ("f (model.py:12)") and its arguments; ("", {}) where it is not
    to be found: Dynamo hands backends neither, so they are read off its frames on the stack."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_compile" and frame.f_globals.get("__name__") == _CONVERT:
            code = frame.f_locals.get("code")
            compiled = frame.f_locals.get("frame")
            values = getattr(compiled, "f_locals", None) or frame.f_locals.get("locals") or {}
            if code is None:
                break
            file = os.path.basename(code.co_filename)
            return f"{code.co_name} ({file}:{code.co_firstlineno})", dict(values)
        frame = frame.f_back
    return "", {}


_CONVERT = "torch._dynamo.convert_frame"


def donate_nothing() -> None:
    """Say of the forward being compiled that its backward overwrites none of the saved values: AOTAutograd
    would refuse `retain_graph=True` for good, once a backward (in the process that filled a cache, say) went
    without."""
    from torch._guards import TracingContext

    metadata = getattr(TracingContext.try_get(), "fw_metadata", None)
    if metadata is not None:
        metadata.bw_donated_idxs = []


def views_of_inputs() -> set[int]:
    """Positions, among the results of the graph that AOTAutograd is compiling, of views of inputs: it makes
    those views anew, with the sizes, strides and offset of the result."""
    from torch._functorch._aot_autograd.schemas import OutputType
    from torch._guards import TracingContext

    metadata = getattr(TracingContext.try_get(), "fw_metadata", None)
    first = getattr(metadata, "num_mutated_inp_runtime_indices", 0)
    infos = getattr(metadata, "output_info", ())
    return {first + k for k, i in enumerate(infos) if i.output_type is OutputType.alias_of_input}


def weights_of(gm: Any) -> dict[int, str]:
    """Names of the parameters and buffers among the inputs of the graph that AOTAutograd is compiling, by
    position there; `gm` is Dynamo's graph. Without what was given a fixed address by hand
    (`mark_static_address`), as inputs are that change at every call."""
    from torch._guards import TracingContext

    metadata = getattr(TracingContext.try_get(), "fw_metadata", None)
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    own = len(list(gm.parameters())) + len(list(gm.buffers()))  # before the inputs, where Dynamo lifts none
    found = {}
    for k in getattr(metadata, "static_input_indices", None) or ():
        meta = inputs[k - own].meta if own <= k < own + len(inputs) else {}
        if (meta.get("tensor_dict") or {}).get("_dynamo_static_input_type", "unguarded") == "unguarded":
            source = getattr(meta.get("grapharg"), "source", None)
            name = getattr(source, "name", None)
            found[k] = _weight_name(str(name() if callable(name) else name), k)
    return found


def _weight_name(source: str, position: int) -> str:
    """L['self']._modules['fc']._parameters['weight']  ->  self.fc.weight"""
    text = re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", source)
    return re.sub(r"^[LG]\['(\w+)'\]", r"\1", text) if source != "None" else f"input {position}"


def reset_dynamo() -> None:
    """Forget what Dynamo has compiled."""
    torch._dynamo.reset()


def load_backend(name: str) -> None:
    """Import what a backend of torch.compile consists of, and compile nothing."""
    torch._dynamo.backends.registry.lookup_backend(name)
    if name == "inductor":
        from torch._inductor import compile_fx  # noqa: F401


def inductor_freezing() -> Any:
    """A context in which Dynamo and Inductor compile weights as constants, where no gradients are wanted."""
    from torch._inductor import config

    return config.patch(freezing=True)


def graph_breaks(since: int = 0) -> list[str]:
    """Why and at which of the user's lines Dynamo broke graphs in this process, from the `since`-th on: one
    text per place."""
    from torch._dynamo.utils import graph_break_reasons

    texts = []
    for found in graph_break_reasons[since:]:
        text = found.reason.splitlines()[0]
        if found.user_stack:
            frame = found.user_stack[-1]
            text += f"    {os.path.basename(frame.filename)}:{frame.lineno}  {frame.line or ''}".rstrip()
        texts.append(text)
    return list(dict.fromkeys(texts))


def graph_break_count() -> int:
    """How many graph breaks Dynamo has noted in this process."""
    from torch._dynamo.utils import graph_break_reasons

    return len(graph_break_reasons)


window: Callable[[torch.Tensor, _Sizes, _Sizes, int], torch.Tensor] = _reinterpret_tensor
"""A view of a tensor's memory (base, shape, strides, offset), `offset` elements behind its start: torch's own
function, called hundreds of times by a program of library calls."""


def raw_stream(device: int) -> int:
    """The handle of the current CUDA stream of a device."""
    return torch._C._cuda_getCurrentRawStream(device)  # type: ignore[no-any-return]


def keep_gpu_busy(seconds: float) -> None:
    """Give the current stream a kernel of at least that long, at the clock of today's GPUs or less."""
    torch.cuda._sleep(round(seconds * 2e9))  # type: ignore[attr-defined]


def current_cuda_device() -> int:
    """The index of the current CUDA device of this thread."""
    return torch._C._cuda_getDevice()  # type: ignore[no-any-return]


def forget_cublas_workspaces() -> None:
    """Have cuBLAS ask for memory to work in again. torch keeps one piece for a stream: of several captures on
    it all would use that of the first, which goes when the first does."""
    torch._C._cuda_clearCublasWorkspaces()


def end_allocations(device: int, pool: tuple[int, int]) -> None:
    """Have the allocator leave the pool of a capture whose end failed, which torch then does not."""
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:
        return  # the capture ended; what ran in it failed
    torch._C._cuda_releasePool(device, pool)


def storage_place(t: torch.Tensor) -> int | None:
    """What tells t's storage, fake ones too, from others; None where t has none, as some subclasses."""
    try:
        return t.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):
        return None


def attention_kernels() -> tuple[bool, ...]:
    """Which kernels of attention are allowed (torch.nn.attention.sdpa_kernel): tracing goes by it."""
    cuda = torch.backends.cuda
    return (
        cuda.flash_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )


def storage_users(t: torch.Tensor) -> int:
    """How many tensors (and storage objects) share t's memory."""
    storage = t.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined, no-any-return]


@functools.cache
def torch_library() -> ctypes.CDLL | None:
    """A handle on torch's CPU library, which is loaded already; None where torch is built otherwise."""
    try:
        return ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
    except OSError:
        return None


def library_error() -> str:
    """What torch said of the last call through its C interface that failed in this thread; empty on torch
    2.11 and 2.12, which write it to stderr and keep nothing."""
    said = getattr(torch_library(), "torch_exception_get_what_without_backtrace", None)
    if said is None:
        return ""
    said.restype, said.argtypes = ctypes.c_char_p, ()
    return (said() or b"").decode(errors="replace")

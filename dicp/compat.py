"""Every private torch import of dicp, behind names that stay the same for torch 2.11 to 2.13."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NoReturn

import sympy
import torch
from torch._guards import detect_fake_mode as _detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.experimental.symbolic_shapes import statically_known_true as _statically_known_true

from dicp.autoload import ARTIFACT, register_artifact

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "fake_mode_of",
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
    return int(node.hint) if node.has_hint() and node.hint is not None else fallback


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


@contextmanager
def real_tensors() -> Iterator[None]:
    """Run operators on data, inside a compile too, where fake tensors and tracers would take them over."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch.no_grad():
        yield


def promoted_dtypes(kind: str, *operands: object) -> tuple[torch.dtype, torch.dtype]:
    """The dtype torch computes an elementwise op in, and that of its result, for tensors and Python numbers.
    """
    from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as KINDS
    from torch._prims_common import elementwise_dtypes

    return elementwise_dtypes(*operands, type_promotion_kind=KINDS[kind])  # type: ignore[arg-type]


def empty_strided_cpu(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised CPU tensor, by the shortest path there is."""
    from torch._C._dynamo.guards import _empty_strided_cpu  # type: ignore[attr-defined]

    return _empty_strided_cpu(shape, strides, dtype)  # type: ignore[no-any-return]


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


def torch_decompositions() -> dict[object, Callable[..., object]]:
    """A copy of torch's own decompositions: the core set, and every other one that is registered."""
    from torch._decomp import decomposition_table

    return dict(decomposition_table)


def core_decompositions() -> set[object]:
    """Ops that torch itself decomposes on the way to its core set."""
    from torch._decomp import _core_aten_decompositions_post_autograd

    return set(_core_aten_decompositions_post_autograd())


def higher_order_name(target: Any) -> str | None:
    """The name under torch.ops.higher_order, None for anything else."""
    from torch._ops import HigherOrderOperator

    return target.name() if isinstance(target, HigherOrderOperator) else None


def counters() -> Any:
    """torch's counters of this backend: torch._dynamo.utils.counters["dicp"]."""
    from torch._dynamo.utils import counters as all_counters

    return all_counters["dicp"]


def aot_compile(
    gm: Any,
    example_inputs: Any,
    *,
    forward: Any,
    backward: Any,
    inference: Any,
    decompositions: Any,
    partitioned: Callable[[Any, Any, int], None] = lambda forward, backward, visible: None,
    tag: str | None = None,
) -> Any:
    """AOTAutograd with the min-cut partitioner; mutated inputs stay copy_ nodes of the graphs.

    partitioned: edits a forward and its backward, given how many of the forward's results are not saved ones.
    tag: the compilers return what `output_code` is the base of, and AOTAutograd's cache is used; its key
    has the tag in it.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def partition(joint: Any, inputs: Any, **given: Any) -> tuple[Any, Any]:
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **given)
        partitioned(forward, backward, given["num_fwd_outputs"])
        return forward, backward

    compilers = {"fw_compiler": forward, "bw_compiler": backward, "inference_compiler": inference}
    with ExitStack() as stack:
        if tag is not None:
            from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler

            compilers = {k: SerializableAOTDispatchCompiler(output_code(), c) for k, c in compilers.items()}
            stack.enter_context(_caching(tag))
        compiled = aot_autograd(
            **compilers,
            decompositions=decompositions,
            partition_fn=partition,
            keep_inference_input_mutations=True,
        )(gm, example_inputs)
        return _for_file(compiled) if must_save() else compiled


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
    output = next(iter(reversed(graph.graph.nodes)))
    mutated = [d.mutated_input for d in output.meta.get("desc", ()) if hasattr(d, "mutated_input")]
    return {n for n in graph.graph.nodes if n.op == "placeholder" and n.meta.get("desc") in mutated}


class Shortcut:
    """AOTAutograd's cache, without what torch's key costs once per process: importing Inductor's code
    generators, and hashing the sources of torch and triton, more than a second.

    A key of our own leads to torch's, in a file beside torch's entries. Only an entry that holds our key is
    taken, so that a wrong or outdated file is a miss. `key` is "" where there is no such way.
    """

    def __init__(self, gm: Any, example_inputs: Any, tag: str) -> None:
        from torch._functorch._aot_autograd import autograd_cache

        self.key, self._gm, self._tag = "", gm, tag
        plain = all(isinstance(x, (torch.Tensor, torch.SymInt, int, float)) for x in example_inputs)
        triton = any(str(higher_order_name(n.target)).startswith("triton") for n in gm.graph.nodes)
        # torch has the hook that the key relies on since 2.13; Dynamo's packages go their own way
        known = hasattr(autograd_cache.AOTAutogradCacheDetails, "_init_fx_graph_hash_details")
        if known and plain and not triton and not must_save() and not torch._dynamo.config.caching_precompile:
            with _caching(tag), suppress(Exception):  # what cannot be prepared or hashed has no key
                self._prepare(example_inputs)
                self.key = self._hash()

    def _prepare(self, example_inputs: Any) -> None:
        from torch._functorch import aot_autograd, config

        prepared = aot_autograd.prepare_aot_module_simplified(
            self._gm,
            example_inputs,
            None,
            {},
            True,
            False,
            flatten=False,
            force_non_lazy_backward_lowering=config.force_non_lazy_backward_lowering,
        )
        self._parameters, self._inputs, self._config = prepared[1], prepared[4], prepared[6]

    def _hash(self) -> str:
        from torch._functorch._aot_autograd import autograd_cache as cache

        class Details(cache.AOTAutogradCacheDetails):
            def _init_fx_graph_hash_details(self, gm: Any, example_inputs: Any, fx_config: Any) -> None:
                self.gm, self.example_inputs = gm, example_inputs
                self.settings = _torch_settings()

            def get_triton_source_codes_from_gm(self, gm: Any) -> list[str]:
                return []  # there are none, and asking imports Inductor's code generators

        with cache.sanitize_gm_for_cache(self._gm):
            cache.check_cacheable(self._gm)
            details = Details(self._gm, self._inputs, self._config, cache.create_fx_config())
            return "dicp" + str(cache.AOTAutogradCachePickler(self._gm).get_hash(vars(details)))

    def _file(self) -> str:
        from torch._inductor.runtime.runtime_utils import cache_dir

        return os.path.join(cache_dir(), "dicp", self.key)

    def load(self) -> Any:
        """The compiled function, where the cache has it; else None."""
        from torch._functorch._aot_autograd import autograd_cache as cache

        if not self.key or not cache.should_use_local_autograd_cache():
            return None
        with _caching(self._tag), suppress(Exception):  # as torch does: whatever is wrong, it is a miss
            with open(self._file()) as file:
                key = file.read()
            if not (len(key) > 32 and key.isalnum()):  # damaged
                return None
            found = cache.AOTAutogradCache._lookup(key, True, False, self._inputs, {}, self._config)
            if found is not None and getattr(found[0].compiled_fw.result, "key", "") == self.key:
                return self._function(
                    found[0].wrap_post_compile(self._inputs, self._config, cache.create_fx_config())
                )
        return None

    def _function(self, compiled: Any) -> Any:
        from torch._dynamo.utils import counters as all_counters

        for name in ("total", "ok", "autograd_cache_hit"):
            all_counters["aot_autograd"][name] += 1
        parameters = list(self._parameters)

        def forward(*args: Any) -> Any:
            return compiled([*parameters, *args])

        return torch._dynamo.disable(forward, reason="do not trace AOT-compiled graph")

    def note(self) -> None:
        """Write down where torch has stored, or found, the result that holds our key."""
        from torch.compiler._cache import CacheArtifactManager

        if not self.key:
            return
        mark = self.key.encode()
        for artifact in CacheArtifactManager._new_cache_artifacts.get("aot_autograd", ()):
            if mark in artifact.content:
                with suppress(OSError):  # a cache that cannot be written
                    path = self._file()
                    os.makedirs(os.path.dirname(path), exist_ok=True)
                    beside = f"{path}.{os.getpid()}.{threading.get_ident()}"
                    with open(beside, "w") as file:
                        file.write(artifact.key)
                    os.replace(beside, path)


def _torch_settings() -> tuple[Any, ...]:
    """What torch's key has beside the graph and AOTAutograd's settings, as far as it matters to dicp."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    shapes = getattr(getattr(context, "fake_mode", None), "shape_env", None)
    hints = getattr(shapes, "var_to_hint_override", None) or {}
    return (
        torch.compiler.config.cache_key_tag,
        _torch_files(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        str(torch.get_default_device()),
        torch.cuda.current_device() if torch.cuda.is_initialized() else None,
        sorted((str(symbol), value) for symbol, value in hints.items()),
    )


@functools.cache
def _torch_files() -> str:
    """Which torch this is: names, sizes and times of its sources."""
    found, folders = [torch.__version__], [os.path.dirname(torch.__file__)]
    while folders:
        with os.scandir(folders.pop()) as listing:
            for item in listing:
                if item.name.endswith(".py"):
                    status = item.stat()
                    found.append(f"{item.path} {status.st_size} {status.st_mtime_ns}")
                elif item.is_dir() and item.name not in ("__pycache__", "include", "lib", "testing"):
                    folders.append(item.path)
    return hashlib.blake2b("\n".join(sorted(found)).encode(), digest_size=16).hexdigest()


def _for_file(compiled: Any) -> Any:
    """What torch's `aot_compile` takes from a backend: 2.11 wraps the result of its own backends only."""
    if torch.torch_version.TorchVersion(torch.__version__) >= (2, 12) or not hasattr(compiled, "serialize"):
        return compiled
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable

    return BundledAOTAutogradSerializableCallable(compiled)


@contextmanager
def _caching(tag: str) -> Iterator[None]:
    """The settings that AOTAutograd's cache is used under; they hold for this thread alone."""
    from torch._functorch import config

    settings = {
        "bundled_autograd_cache": True,  # the result itself, not a key of Inductor's cache
        # Dynamo's package is saved as it is then: no backward could be added to it later
        "force_non_lazy_backward_lowering": config.force_non_lazy_backward_lowering
        or torch._dynamo.config.caching_precompile,
    }
    user = torch.compiler.config.cache_key_tag
    with config.patch(settings), torch.compiler.config.patch(cache_key_tag=f"{user}{tag}"):
        yield


def output_code() -> type:
    """The base class of what an inner compiler returns when AOTAutograd is to store it."""
    from torch._inductor.output_code import OutputCode

    return OutputCode


def must_save() -> bool:
    """Whether torch is compiling for a file (`aot_compile`)."""
    from torch._functorch import config

    return bool(config.force_autograd_cache and config.bundled_autograd_cache)


def bypass_cache(reason: str) -> NoReturn:
    """Tell AOTAutograd's cache, while it saves a result, that this one is not to be stored."""
    from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache

    raise BypassAOTAutogradCache(reason)


def record_artifact(key: str, content: bytes) -> None:
    """Have `torch.compiler.save_cache_artifacts` carry this entry of the build cache."""
    from torch.compiler._cache import CacheArtifactManager

    register_artifact()
    CacheArtifactManager.record_artifact(ARTIFACT, key, content)


_late = threading.local()


def bundling() -> bool:
    """Whether this thread is inside `aot_compile` with a tag."""
    from torch._functorch import config

    return bool(config.bundled_autograd_cache)


def begin_bundling() -> None:
    """AOTAutograd's cache stores bundled results in this thread, until `end_bundling`."""
    from torch._functorch import config

    end_bundling()
    _late.settings = config.patch(bundled_autograd_cache=True)
    _late.settings.__enter__()


def end_bundling() -> None:
    """Undo `begin_bundling`; nothing where there was none."""
    settings = getattr(_late, "settings", None)
    if settings is not None:
        _late.settings = None
        settings.__exit__(None, None, None)


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


def window(base: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> torch.Tensor:
    """A view of base's memory, `offset` elements behind its start, by the shortest path there is."""
    from torch._C._dynamo.guards import _reinterpret_tensor  # type: ignore[attr-defined]

    return _reinterpret_tensor(base, shape, strides, offset)  # type: ignore[no-any-return]


def raw_stream(device: int) -> int:
    """The handle of the current CUDA stream of a device."""
    return torch._C._cuda_getCurrentRawStream(device)  # type: ignore[no-any-return]


def current_cuda_device() -> int:
    """The index of the current CUDA device of this thread."""
    return torch._C._cuda_getDevice()  # type: ignore[no-any-return]


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

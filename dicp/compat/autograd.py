"""AOTAutograd, torch's own caches of what it compiles, and what dicp has them keep."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NoReturn

import torch

from dicp.autoload import ARTIFACT, register_artifact
from dicp.compat import higher_order_name


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
    entry: str = "",
) -> Any:
    """AOTAutograd with the min-cut partitioner; mutated inputs stay copy_ nodes of the graphs.

    partitioned: edits a forward and its backward, given how many of the forward's results are not saved ones.
    tag: the compilers return what `output_code` is the base of, and AOTAutograd's cache is used; its key
    has the tag in it. entry: the key to store the result under in place of torch's (Shortcut.entry).
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
        if entry:
            return _in_stages(gm, example_inputs, entry, compilers, decompositions, partition)
        compiled = aot_autograd(
            **compilers,
            decompositions=decompositions,
            partition_fn=partition,
            keep_inference_input_mutations=True,
        )(gm, example_inputs)
        return _for_file(compiled) if must_save() else compiled


def _in_stages(
    gm: Any, example_inputs: Any, entry: str, compilers: Any, decompositions: Any, partition: Any
) -> Any:
    """What torch's `aot_module_simplified` does on a miss, the result stored under a key of ours."""
    from torch._dynamo import compiled_autograd
    from torch._dynamo.utils import counters
    from torch._functorch import aot_autograd as aot
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
    from torch._functorch._aot_autograd.schemas import AOTAutogradCacheInfo

    fw, bw, inference = (compilers[k] for k in ("fw_compiler", "bw_compiler", "inference_compiler"))
    bw.compiler_fn = _not_traced(bw.compiler_fn)
    counters["aot_autograd"]["total"] += 1
    counters["aot_autograd"]["autograd_cache_miss"] += 1
    with ExitStack() as stack:
        call, parameters, _, _, inputs, named, config, mode, shapes, _, _, activations = _prepared(
            gm, example_inputs, decompositions
        )
        symints = AOTAutogradCache._filter_backed_symints(inputs)
        info = AOTAutogradCacheInfo(entry, time.time_ns(), forward_symints=symints)
        config = dataclasses.replace(config, cache_info=info)
        stack.enter_context(compiled_autograd._disable())
        state = aot.create_aot_state(stack, call, inputs, named, config, mode, shapes)
        state.fw_metadata.act_input_indices = activations
        traced = aot.aot_stage1_graph_capture(state, call)
        compiled, _ = aot.aot_stage2_compile(state, traced, partition, fw, bw, inference)
    counters["aot_autograd"]["ok"] += 1
    return _function(compiled, parameters)


def _prepared(gm: Any, example_inputs: Any, decompositions: Any) -> tuple[Any, ...]:
    from torch._functorch import aot_autograd, config

    return aot_autograd.prepare_aot_module_simplified(  # type: ignore[no-any-return]
        gm,
        example_inputs,
        None,
        decompositions,
        True,
        False,
        flatten=False,
        force_non_lazy_backward_lowering=config.force_non_lazy_backward_lowering,
    )


def _not_traced(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """Neither the compiler of backwards nor what it makes is for Dynamo to trace."""

    def compile_backward(*args: Any, **kwargs: Any) -> Any:
        made = torch._dynamo.disable(compiler, reason="dicp's compiler of backwards")(*args, **kwargs)
        return torch._dynamo.disable(made, reason="a compiled backward")

    return compile_backward


def _function(compiled: Any, parameters: Any) -> Any:
    """What Dynamo calls, of what AOTAutograd gave."""

    def forward(*args: Any) -> Any:
        return compiled([*parameters, *args])

    return torch._dynamo.disable(forward, reason="do not trace AOT-compiled graph")


class Shortcut:
    """AOTAutograd's cache, without what torch's key costs once per process: importing Inductor's code
    generators, and hashing the sources of triton, a second.

    Entries are stored under `entry`, a key of our own that is the same on every machine with this torch,
    whose sources it takes a moment to hash. `key`, which knows them by names, sizes and times, leads to it in
    a file beside torch's entries. From there only an entry that holds `key` is taken, so that a wrong or
    outdated file is a miss. `key` is "" where there is no such way, `entry` until a look-up failed.
    """

    def __init__(self, gm: Any, example_inputs: Any, tag: str) -> None:
        from torch._functorch._aot_autograd import autograd_cache

        self.key, self.entry, self._gm, self._tag = "", "", gm, tag
        plain = all(isinstance(x, (torch.Tensor, torch.SymInt, int, float)) for x in example_inputs)
        triton = any(str(higher_order_name(n.target)).startswith("triton") for n in gm.graph.nodes)
        # torch has the hook that the key relies on since 2.13; Dynamo's packages go their own way
        known = hasattr(autograd_cache.AOTAutogradCacheDetails, "_init_fx_graph_hash_details")
        known = known and not autograd_cache.should_use_remote_autograd_cache()
        if known and plain and not triton and not must_save() and not torch._dynamo.config.caching_precompile:
            with _caching(tag), suppress(Exception):  # what cannot be prepared or hashed has no key
                prepared = _prepared(gm, example_inputs, {})
                self._parameters, self._inputs, self._config = prepared[1], prepared[4], prepared[6]
                self._graph = self._hash()
                self.key = "dicp" + _hashed(self._graph + _torch_files())

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
            return str(cache.AOTAutogradCachePickler(self._gm).get_hash(vars(details)))

    def _file(self) -> str:
        from torch._inductor.runtime.runtime_utils import cache_dir

        return os.path.join(cache_dir(), "dicp", self.key)

    def load(self) -> Any:
        """The compiled function, where the cache has it; else None, and `entry` is known."""
        from torch._functorch._aot_autograd import autograd_cache as cache

        if not self.key or not cache.should_use_local_autograd_cache():
            return None
        # as torch does: whatever is wrong, it is a miss
        with _caching(self._tag), suppress(Exception), open(self._file()) as file:
            noted = file.read()
            found = self._entry(noted) if len(noted) > 32 and noted.isalnum() else None  # else damaged
            if self._holds_key(found):
                return self._bound(found)
        with _caching(self._tag), suppress(Exception):
            from torch._inductor.codecache import torch_key

            self.entry = "adicp" + _hashed(self._graph + torch_key().hex())
            if (found := self._entry(self.entry)) is not None:
                if self._holds_key(found):
                    self._point()
                return self._bound(found)
        return None

    def _holds_key(self, entry: Any) -> bool:
        """Not where it was made on another machine."""
        return entry is not None and getattr(entry.compiled_fw.result, "key", "") == self.key

    def _entry(self, key: str) -> Any:
        from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache

        found = AOTAutogradCache._lookup(key, True, False, self._inputs, {}, self._config)
        return None if found is None else found[0]

    def _bound(self, entry: Any) -> Any:
        from torch._dynamo.utils import counters
        from torch._functorch._aot_autograd.autograd_cache import create_fx_config

        compiled = entry.wrap_post_compile(self._inputs, self._config, create_fx_config())
        for name in ("total", "ok", "autograd_cache_hit"):
            counters["aot_autograd"][name] += 1
        return _function(compiled, self._parameters)

    def note(self) -> None:
        """Write down where torch has stored the result that holds our key, if it has."""
        from torch.compiler._cache import CacheArtifactManager

        mark = self.key.encode()
        stored = CacheArtifactManager._new_cache_artifacts.get("aot_autograd", ())
        if self.entry and any(a.key == self.entry and mark in a.content for a in stored):
            self._point()

    def _point(self) -> None:
        with suppress(OSError):  # a cache that cannot be written
            path = self._file()
            os.makedirs(os.path.dirname(path), exist_ok=True)
            beside = f"{path}.{os.getpid()}.{threading.get_ident()}"
            with open(beside, "w") as file:
                file.write(self.entry)
            os.replace(beside, path)


def _torch_settings() -> tuple[Any, ...]:
    """What torch's key has beside the graph and AOTAutograd's settings, as far as it matters to dicp."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    shapes = getattr(getattr(context, "fake_mode", None), "shape_env", None)
    hints = getattr(shapes, "var_to_hint_override", None) or {}
    return (
        torch.compiler.config.cache_key_tag,
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
    return _hashed("\n".join(sorted(found)))


def _hashed(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


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

"""From a Program to a callable: emit kernels, compile them in parallel, write the Python function that
launches them.

The function allocates one arena (torch's caching allocator, so statistics and out-of-memory behaviour stay
right), then launches kernels and calls libraries on the current stream of the inputs' device. Nothing in it
waits for the GPU.

Run-time index checks raise flags in pinned host memory, which the GPU writes directly: a failed check costs
no synchronisation, and is reported by the next call of the program that begins after the kernel ran
(interpreted: at once).
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from dicp import compat
from dicp.config import Config
from dicp.errors import NoCompileError, check_error
from dicp.ir import index as ix
from dicp.ir.index import Index
from dicp.runtime.program import BuildStats, Program, Segment
from dicp.runtime.runner import Runner
from dicp.runtime.workers import worker_count
from dicp.schedule.defs import Buffer, Call, View, views
from dicp.schedule.kernels import Launch
from dicp.vendor.asking import emitted
from dicp.vendor.cuda_graph import codegen
from dicp.vendor.cuda_graph.expression import host_text
from dicp.vendor.cuda_graph.module import Source
from dicp.vendor.cuda_graph.placement import anchor_of, on_device
from dicp.vendor.cuda_graph.templates import Launched, Template, TemplateClaim

MAX_WORKERS = 8


def assemble(program: Program, config: Config) -> Callable[[list[Any]], Any]:
    """The function that runs the program. Raises BuildError, NoCompileError."""
    program.verify &= not config.cuda_graphs  # nothing waits for a device that is captured
    sources = emit_all(program, config)
    program.sources = {f"{s.name}.py": s.text for s in sources.values()}
    start = time.perf_counter()
    kernels = load_all(sources, config)
    program.build_stats = BuildStats(compiled=len(kernels), seconds=time.perf_counter() - start)
    runner = DeviceRunner(program, sources, kernels, config)
    call = runner.function()
    program.sources["call.py"] = runner.source
    if config.interpret:
        return call
    if config.cuda_graphs:
        from dicp.vendor.cuda_graph.graphs import capturing

        call = capturing(call, program, raise_checks=runner.raise_checks)
    return on_device(call, program.lowered)


def emit_all(program: Program, config: Config) -> dict[str, Source | Template]:
    """Each distinct kernel once, by digest."""
    exact = config.numerics == "eager"
    out: dict[str, Source | Template] = dict(
        emitted(program, lambda kernel, name: codegen.emit(kernel, config.interpret, exact, name))
    )
    for call in program.library_calls:
        for made in template_launches(call):
            out.setdefault(made.template.digest, made.template)
    return out


def _launches_surely(source: Source | Template) -> bool:
    """Whether there are programs to launch, whatever the sizes of a call are."""
    return not source.sizes and programs_function(source)() > 0


def template_launches(call: Call) -> Sequence[Launched]:
    """The kernels of our own that serve a claimed call; none, where a library does."""
    return call.claim.kernels(call) if isinstance(call.claim, TemplateClaim) else ()


def load_all(sources: Mapping[str, Source | Template], config: Config) -> dict[str, Any]:
    """Callable kernels by digest; for a GPU, the common variant of each is compiled now, in parallel."""
    from dicp.vendor.cuda_graph import launch

    out: dict[str, Any] = {}
    for digest, source in sources.items():
        fn = launch.load(source, config)
        count = programs_function(source)
        if config.interpret:
            out[digest] = launch.InterpretedKernel(source, fn, count)
        else:
            out[digest] = launch.GpuKernel(source, fn, count, fusion=config.numerics != "eager")
    if config.interpret or not out:
        return out
    if config.no_compile:
        raise NoCompileError(f"{len(out)} kernels would be compiled", todo="run once with no_compile off")
    device = torch.cuda.current_device()

    def prepare(kernel: Any) -> None:
        with torch.cuda.device(device):
            kernel.prepare(device)

    workers = config.workers or min(worker_count(), MAX_WORKERS)
    with concurrent.futures.ThreadPoolExecutor(min(workers, len(out)), "dicp-triton") as pool:
        for done in [pool.submit(prepare, k) for k in out.values()]:
            done.result()
    return {digest: kernel.launching() for digest, kernel in out.items()}


def programs_function(source: Source | Template) -> Callable[..., int]:
    """Programs of a launch, from the kernel's sizes."""
    return eval(f"lambda {', '.join(source.sizes)}: {source.grid}")  # type: ignore[no-any-return]


class DeviceRunner(Runner):
    """Writes the function of a program."""

    def __init__(
        self,
        program: Program,
        sources: Mapping[str, Source | Template],
        kernels: dict[str, Any],
        config: Config,
    ) -> None:
        super().__init__(program, {})
        self.sources, self.kernels, self.interpret = sources, kernels, config.interpret
        self.views: dict[torch.dtype, str] = {}
        self.checks = list(self.lowered.checks)
        self.began = False  # whether a kernel of ours has been launched, whatever sizes are
        self.constant = self._constant()
        self.anchor = anchor_of(self.lowered)
        self.raise_checks: Callable[[], None] | None = None
        self.globals |= {
            "window": compat.window,
            "raw_stream": compat.raw_stream,
            "empty": torch.empty,
            # torch.empty_strided takes three times as long, which hundreds of results of a training step show
            "empty_strided": compat.empty_strided_cpu if config.interpret else compat.empty_strided_cuda,
        }

    def _constant(self) -> set[str]:
        """Inputs that nothing in the program writes; an extern writes where it likes."""
        written = set[str]()
        for item in self.program.items:
            if isinstance(item, Launch):
                written |= item.writes
            else:
                written |= {b.name for b in item.outputs if b is not None}
                written |= set() if item.claim else {v.buffer.name for v in views((item.args, item.kwargs))}
        roots = {self.plan.find(n) for n in written}
        return {b.name for b in self.lowered.inputs if isinstance(b, Buffer)} - roots

    # -- what the base class leaves open ---------------------------------------------------------------------

    def _inputs(self) -> None:
        super()._inputs()
        if self.interpret:
            self.lines.append('device = "cpu"')
        else:
            self.globals["current_device"] = compat.current_cuda_device
            where = "torch.device('cuda', index)" if self.anchor is None else f"arg{self.anchor}.device"
            self.lines += ["index = current_device()", "stream = raw_stream(index)", f"device = {where}"]
            for b in self.lowered.inputs:
                if (
                    isinstance(b, Buffer) and b.shape == ()
                ):  # a number on the host goes along with GPU tensors
                    name = self.names[b.name]
                    filled = f"torch.full((), {name}.item(), dtype={name}.dtype, device=device)"
                    self.lines.append(f"if not {name}.is_cuda: {name} = {filled}")
        if self.checks:
            self.globals["CHECKS"] = flags = Checks(self.checks, pinned=not self.interpret)
            self.raise_checks = flags.raise_any
            self.lines.append("CHECKS.raise_any()")

    def _let_results_rest(self) -> None:
        """Memory comes from torch's caching allocator, which keeps it."""

    def _take_arena(self) -> None:
        if self.plan.offset:
            # 16 more bytes, so that a window at the end is whole elements of every dtype
            self.lines.append(f"block = empty({self._arena_bytes()} + 16, dtype=torch.uint8, device=device)")
            self.lines.append("base = block.data_ptr()")

    def _give_arena(self) -> None:
        if self.checks and self.interpret:
            self.lines.append("CHECKS.raise_any()")

    def _allocate(self, name: str, buffer: Buffer) -> None:
        shape, strides = self._tuple(buffer.shape), self._tuple(buffer.strides)
        self.lines.append(f"{name} = empty_strided({shape}, {strides}, {buffer.dtype})")

    def _temporaries(self, segment: Segment) -> None:
        """They begin with the item that uses them first, and are freed after the one that uses them last."""

    def _native(self, segment: Segment) -> None:
        for k, item in enumerate(segment.items):
            for root in segment.allocs.get(k, []):
                self.names[root] = root
                self._allocate(root, self.lowered.buffers[root])
            if isinstance(item, Launch):
                self._launch(item)
            else:
                self._library(item)
            for root in segment.frees.get(k, []):
                if root in self.names:
                    self.lines.append(f"del {self.names.pop(root)}")

    # -- kernels ---------------------------------------------------------------------------------------------

    def _launch(self, launch: Launch) -> None:
        source = self.sources[launch.kernel.digest]
        self.globals[source.name] = self.kernels[launch.kernel.digest]
        args = [self._wide(launch)]
        args += [self._tensor(b) if self.interpret else self._address(b) for b in launch.buffers]
        args += [v.name for v in launch.kernel.sizes]
        if source.checks:
            args.append(
                f"CHECKS.flags[{launch.first_check}:]"
                if self.interpret
                else f"CHECKS.address + {4 * launch.first_check}"
            )
        head = [] if self.interpret else ["index", "stream"]
        self.lines.append(f"{source.name}({', '.join(head + args)})")
        self.began = self.began or _launches_surely(source)

    def templates(self, call: Call) -> None:
        """The launches of a call that templates serve, and the scratch memory that they share."""
        from dicp.vendor.cuda_graph.launch import ALONE

        launches = template_launches(call)
        scratch = next((made.scratch for made in launches if None in made.operands), None)
        if scratch is not None:
            self.lines.append(f"scratch = empty({host_text(scratch)}, dtype=torch.float32, device=device)")
        for made in launches:
            source = made.template
            self.globals[source.name] = self.kernels[source.digest]
            windows = [v for v in made.operands if v is not None]
            args = [self._wide_of([*(v.span for v in windows), made.scratch])]
            early = all(self._may_be_read_ahead(made.operands[k]) for k in made.ahead)
            if not (early or self.interpret):
                args = [f"({args[0]}) + {ALONE}"]
            for v in made.operands:
                if v is None:
                    args.append("scratch" if self.interpret else "scratch.data_ptr()")
                else:
                    args.append(self._pointed(v))
            head = [] if self.interpret else ["index", "stream"]
            self.line(f"{source.name}({', '.join([*head, *args, *source.sizes])})", call.note)
            self.began = self.began or _launches_surely(source)
        if scratch is not None:
            self.lines.append("del scratch")

    def _may_be_read_ahead(self, v: View | None) -> bool:
        """Whether memory may be read before the kernel before is known to have ended: nothing in the program
        writes there, and what came before the program has ended before one of its kernels went on."""
        return v is not None and self.began and self.plan.find(v.buffer.name) in self.constant

    def _pointed(self, v: View) -> str:
        """A window as the launch takes it: its address, interpreted a tensor there."""
        if self.interpret:
            if v.buffer.numel == 0:
                return f"empty(1, dtype={v.buffer.dtype})"
            return self.view(View(v.buffer, (1,), (1,), v.offset))
        address = self._address(v.buffer)
        if v.offset == 0:
            return address
        return f"{address} + {v.buffer.dtype.itemsize} * ({host_text(v.offset)})"

    def _wide(self, launch: Launch) -> str:
        """Whether positions, or numbers made of them, need 64 bits; found at each call when sizes are
        symbolic."""
        extents = [ix.product(a.size for a in launch.kernel.axes)]
        values = [e.args[0] for s in launch.kernel.body for e in s.expressions if e.op == "index"]
        reached = (r for i in values for r in ix.reach(i))
        return self._wide_of([*extents, *(b.span for b in launch.buffers), *reached])

    def _wide_of(self, spans: Iterable[Index]) -> str:
        from dicp.vendor.cuda_graph.launch import WIDE

        spans = list(spans)
        if any(isinstance(r, int) and r > WIDE for r in spans):
            return "True"
        texts = dict.fromkeys(f"{host_text(r)} > {WIDE}" for r in spans if not isinstance(r, int))
        return " or ".join(texts) or "False"

    def _address(self, b: Buffer) -> str:
        root = self.plan.find(b.name)
        if root in self.plan.offset:
            offset = self.plan.offset[root]
            return "base" if offset == 0 else f"base + {host_text(offset)}"
        if root in self.plan.borrowed:
            lender, offset = self.plan.borrowed[root]
            return f"{self.names[lender]}.data_ptr() + {host_text(offset)}"
        return f"{self._tensor_name(b.name)}.data_ptr()"

    def _tensor(self, b: Buffer) -> str:
        """A tensor on the buffer's memory, for the interpreter, which reads elements of its dtype."""
        if b.numel == 0:
            return f"empty(1, dtype={b.dtype})"  # an address that may be read
        root = self.plan.find(b.name)
        if root in self.plan.offset or root in self.plan.borrowed:
            return self.view(View(b, (1,), (1,)))
        name, owner = self._tensor_name(b.name), self.lowered.buffers[root]
        if owner.dtype.is_complex and not b.dtype.is_complex:
            return f"parts({name})"
        return name if owner.dtype == b.dtype else f"{name}.view({b.dtype})"

    # -- tensors ---------------------------------------------------------------------------------------------

    def _window(self, v: View) -> str:
        root = self.plan.find(v.buffer.name)
        shape, strides = self._tuple(v.shape), self._tuple(v.strides)
        if root in self.plan.offset:
            size = v.buffer.dtype.itemsize
            offset = ix.floordiv(self.plan.offset[root], size) + v.offset
            return f"window({self._arena_as(v.buffer.dtype)}, {shape}, {strides}, {self._text(offset)})"
        if root in self.plan.borrowed:
            lender, at = self.plan.borrowed[root]
            if self.lowered.buffers[lender].dtype != v.buffer.dtype:
                return self._within(v)
            offset = ix.floordiv(at, v.buffer.dtype.itemsize) + v.offset
            return f"window({self.names[lender]}, {shape}, {strides}, {self._text(offset)})"
        if self._seen_as(v) is not None:
            return super()._window(v)
        name, owner = self._tensor_name(v.buffer.name), self._owner(v)
        if v.offset == 0 and v.shape == owner.shape and v.strides == owner.strides:
            return name
        return f"window({name}, {shape}, {strides}, {self._text(v.offset)})"

    def _arena_as(self, dtype: torch.dtype) -> str:
        """The arena's name as elements of a dtype, declared at first use."""
        if dtype == torch.uint8:
            return "block"
        if dtype not in self.views:
            name = self.views[dtype] = f"block_{str(dtype).removeprefix('torch.')}"
            self.lines.append(f"{name} = block.view({dtype})")
        return self.views[dtype]

    # -- library calls ---------------------------------------------------------------------------------------

    def _library(self, call: Call) -> None:
        self.claimed(call)

    def name(self, stem: str, what: Any) -> str:
        """A global of the function."""
        self.globals[stem] = what
        return stem


class Checks:
    """The flags of a program's run-time checks."""

    flags: torch.Tensor
    host: Any = None
    address = 0

    def __init__(self, messages: list[str], pinned: bool) -> None:
        self.messages, self.pinned = messages, pinned

    def raise_any(self) -> None:
        """The error of the first flag that is up; all come down. The first call makes the flags."""
        if self.host is None:
            self.flags = torch.zeros(len(self.messages), dtype=torch.int32, pin_memory=self.pinned)
            self.address, self.host = self.flags.data_ptr(), self.flags.numpy()
        if self.host.any():
            number = int(self.host.argmax())
            self.host[:] = 0
            raise check_error(self.messages[number])


__all__ = ["assemble", "emit_all"]

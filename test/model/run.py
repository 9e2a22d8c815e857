"""Run models under a backend and hold them to eager's results: `python -m model.run <model|all> <backend>`.

A line per model, dtype and static/dynamic: whether all was right; milliseconds of a call (llama: of one
decoded token; resnet50: of one training step; else: of one inference call) and eager's; seconds the compiles
took (first calls less steady ones); by how much resident memory peaks in that call (llama: in the prefill),
and eager's; dicp's kernels, library and extern calls; graphs compiled. What failed follows, indented. The
exit code is 1 if anything did, 2 if the models cannot be built here.
"""

import argparse
import copy
import dataclasses
import gc
import json
import math
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch._dynamo.utils import counters

from dicp.bench import arms, measure
from dicp.bench.models import CASES, Case, obstacle
from dicp.bench.models.text import LLAMA_NEW_TOKENS, LLAMA_PROMPTS, tokenizer
from dicp.bench.workloads import DTYPES
from dicp.config import Config
from model import arms as runs
from model import checks

BACKENDS = ("dicp_cpu", "cpugraph", "dicp_cuda", "cudagraph", "dicp", "inductor", "aot_eager", "eager")
ON_GPU = ("dicp_cuda", "cudagraph")
VARIANTS = (0, 1, 2)


@dataclass
class Result:
    """One line of the report."""

    model: str
    backend: str
    dtype: str
    dynamic: bool
    size: str
    ok: bool = True
    ms: float | None = None
    eager_ms: float | None = None
    compile_s: float | None = None
    peak_bytes: int | None = None
    eager_peak_bytes: int | None = None
    kernels: int | None = None
    library: int | None = None
    extern: int | None = None
    graphs: int = 0
    checked: int = 0
    worst: str = ""
    worst_ratio: float = 0.0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def hold(self, verdicts: list[checks.Verdict]) -> None:
        """Take in what the rule said."""
        for v in verdicts:
            self.checked += 1
            ratio = v.distance / v.allowed if v.allowed else float(v.distance > 0)
            if ratio > self.worst_ratio:
                self.worst, self.worst_ratio = v.name, ratio
            if not v.ok:
                self.fail(str(v))

    def fail(self, problem: str) -> None:
        self.ok = False
        self.problems.append(problem)

    def line(self) -> str:
        def number(value: float | None, form: str = "d") -> str:
            return "-" if value is None else format(value, form)

        def mb(value: int | None) -> str:
            return number(None if value is None else value / 2**20, ".0f")

        kind = "dynamic" if self.dynamic else "static"
        return (
            f"{self.model:<9}{self.dtype:<5}{kind:<8}{'ok' if self.ok else 'FAIL':<5}"
            f"{number(self.ms, '.2f'):>8} ms (eager {number(self.eager_ms, '.2f')})"
            f"  compile {number(self.compile_s, '.1f')} s"
            f"  peak {mb(self.peak_bytes)} MB (eager {mb(self.eager_peak_bytes)})"
            f"  kernels {number(self.kernels)}  library {number(self.library)}  extern {number(self.extern)}"
            f"  graphs {self.graphs}"
            f"  [{self.checked} tensors, worst {self.worst_ratio:.2f} of allowed: {self.worst}]"
        )


def graphs_compiled() -> int:
    """Graphs that Dynamo has handed to a backend since its counters were cleared."""
    return int(counters["stats"]["unique_graphs"])


@dataclass(frozen=True)
class Trio:
    """The three runs of one model that are compared. `exact` is None where the machine has not the memory
    for it."""

    case: Case
    size: str
    got: arms.Arm
    eager: arms.Arm
    exact: arms.Arm | None
    variants: tuple[int, ...]
    rounds: int
    device: str = "cpu"

    def inputs(self, variant: int) -> dict[str, torch.Tensor]:
        made = self.case.inputs(self.size, variant, self.eager.dtype)
        return {name: t.to(self.device) for name, t in made.items()}


def memory_available() -> int:
    """Bytes that programs may still take."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def device_of(backend: str) -> str:
    """Where all three runs take place: on the GPU that the backend is for, where there is one."""
    wanted = backend in ON_GPU and torch.cuda.is_available() and not Config.make().interpret
    return "cuda" if wanted else "cpu"


def make_trio(
    case: Case, backend: str, dtype: torch.dtype, dynamic: bool, size: str, rounds: int, result: Result
) -> Trio:
    """Build the model once, and give each run its copy; a model too large for that shares its parameters."""
    device = device_of(backend)
    model = arms.cast(case.build(size), dtype).to(device)
    elements = sum(p.numel() for p in model.parameters())
    roomy = elements * (8 + dtype.itemsize) < 0.7 * memory_available()
    exact = runs.exact_arm(case, model) if roomy else None
    if not roomy:
        result.notes.append("no float64 run: too little memory for it; only tokens are compared")
    twin = copy.deepcopy(model) if roomy else model
    got = arms.compiled_arm(twin, backend, dtype, dynamic)
    eager = arms.Arm("eager", model, model, dtype)
    return Trio(case, size, got, eager, exact, VARIANTS if dynamic else VARIANTS[:1], rounds, device)


def no_recompiles(result: Result, before: int, what: str) -> None:
    """One compile has to serve all that followed it."""
    if graphs_compiled() > before:
        result.fail(f"{what}: {graphs_compiled() - before} further graphs were compiled, expected none")


def compile_seconds(call: measure.Thunk) -> float:
    """First call less a second one."""
    first = measure.seconds(call)
    return max(0.0, first - measure.seconds(call))


def check_inference(trio: Trio, result: Result) -> None:
    """Class scores under the rule, for every size; strides as eager's."""
    result.compile_s = (result.compile_s or 0.0) + compile_seconds(
        lambda: arms.scores(trio.got, trio.inputs(0))
    )
    graphs = graphs_compiled()
    for variant in trio.variants:
        inputs = trio.inputs(variant)
        got, eager = arms.scores(trio.got, inputs), arms.scores(trio.eager, inputs)
        if got.stride() != eager.stride():
            result.fail(f"scores have strides {got.stride()}, eager's {eager.stride()}")
        if trio.exact is not None:
            result.hold(
                [checks.judge(f"scores (size {variant})", got, [eager], arms.scores(trio.exact, inputs))]
            )
    no_recompiles(result, graphs, "inference")


def hold_training(trio: Trio, result: Result, variant: int) -> None:
    """Training at one size; all that it holds, several times the model, is let go at its end."""
    case, inputs = trio.case, trio.inputs(variant)
    count = case.steps if variant == 0 else 1
    with runs.restored(arm.model for arm in (trio.got, trio.eager, trio.exact)):
        ways = runs.eager_ways(trio.eager, case, inputs, count)
        got, exact = (runs.train(arm, case, inputs, count) for arm in (trio.got, trio.exact))
        buffers, exact_buffers = (
            {k: b.clone() for k, b in a.model.named_buffers()} for a in (trio.got, trio.exact)
        )
    eager, eager_buffers = [run for run, _ in ways], [b for _, b in ways]
    at, kinks = f"size {variant}: ", case.kinks
    first = [run[0].gradients for run in eager]
    result.hold(checks.judge_group(at + "gradient", got[0].gradients, first, exact[0].gradients, kinks))
    result.hold(checks.judge_group(at + "buffer", buffers, eager_buffers, exact_buffers, kinks))
    scores = runs.all_scores(exact)
    result.hold(
        [checks.judge(at + "scores", runs.all_scores(got), [runs.all_scores(e) for e in eager], scores)]
    )
    error = max(
        math.hypot(*((checks.rms([e.scores.double() - x.scores]) for e, x in zip(run, exact))))
        for run in eager
    )
    losses, ours, true = [runs.all_losses(run) for run in eager], runs.all_losses(got), runs.all_losses(exact)
    result.hold([checks.judge(at + "losses", ours, losses, true, at_least=error, roundings=math.sqrt(3))])


def check_training(trio: Trio, result: Result) -> None:
    """Training runs from the same start, each going its own way: gradients of the first step, scores of
    each step, the losses, and the buffers (running statistics) at the end; at other sizes, one step."""
    assert trio.exact is not None
    case = trio.case
    with runs.restored([trio.got.model]):
        seconds = compile_seconds(lambda: runs.train(trio.got, case, trio.inputs(0), 1))
        result.compile_s = (result.compile_s or 0.0) + seconds
    graphs = graphs_compiled()
    for variant in trio.variants:
        hold_training(trio, result, variant)
        gc.collect()  # optimizers refer to themselves, and hold as much as the model
    no_recompiles(result, graphs, "training")


def take_times(trio: Trio, result: Result, got: measure.Thunk, eager: measure.Thunk) -> None:
    """Milliseconds of the call that the report is about."""
    wait = torch.cuda.synchronize if trio.device == "cuda" else lambda: None
    result.ms, result.eager_ms = measure.alternating([got, eager], rounds=trio.rounds, wait=wait)


def take_peaks(trio: Trio, result: Result, got: measure.Thunk, eager: measure.Thunk) -> None:
    """Peak memory of the largest call."""
    growth = measure.peak_growth_on_gpu if trio.device == "cuda" else None
    result.peak_bytes, result.eager_peak_bytes = measure.peaks([got, eager], trio.rounds, growth)


def check_ordinary(trio: Trio, result: Result) -> None:
    """A model of scores: training first where it is the main thing, then inference."""
    main_is_training = trio.case.steps > 1
    check_training(trio, result)
    check_inference(trio, result)
    inputs = trio.inputs(0)
    if main_is_training:
        run = [lambda a=arm: runs.train(a, trio.case, inputs, 1) for arm in (trio.got, trio.eager)]
    else:
        run = [lambda a=arm: arms.scores(a, inputs) for arm in (trio.got, trio.eager)]
    with runs.restored([trio.got.model, trio.eager.model]):
        take_times(trio, result, *run)
        take_peaks(trio, result, *run)


def check_generation(trio: Trio, result: Result) -> None:
    """Prefill and greedy decoding: in float32 the tokens are eager's; in every dtype the scores, along the
    tokens that eager chose, are under the rule."""
    count = LLAMA_NEW_TOKENS[trio.size]
    room = max(LLAMA_PROMPTS[trio.size]) + count
    got, eager = arms.Decoder(trio.got, room), arms.Decoder(trio.eager, room)
    exact = arms.Decoder(trio.exact, room) if trio.exact is not None else None
    prompt = trio.inputs(0)["input_ids"]
    length = prompt.shape[1]
    token = prompt[:, -1:]

    def decode(decoder: arms.Decoder) -> None:
        decoder.rewind(length)
        decoder.feed(token)

    result.compile_s = compile_seconds(lambda: got.prefill(prompt)) + compile_seconds(lambda: decode(got))
    graphs = graphs_compiled()
    for variant in trio.variants:
        ids = trio.inputs(variant)["input_ids"]
        tokens = eager.generate(ids, count)
        mine = got.generate(ids, count)
        if trio.eager.dtype == torch.float32 and not torch.equal(mine, tokens):
            place = int((mine != tokens).nonzero()[0, 1])
            result.fail(
                f"size {variant}: token {place} of {count} is {mine[0, place]}, eager's {tokens[0, place]}"
            )
        if exact is not None:
            forced = got.forced(ids, tokens), [eager.forced(ids, tokens)], exact.forced(ids, tokens)
            result.hold(checks.judge_group(f"size {variant}:", *forced, kinks=False))
        reader = tokenizer()
        if reader is not None and variant == 0:
            result.notes.append(
                "generated: " + reader.decode(mine[0], skip_special_tokens=True)[:200].replace("\n", " ")
            )
    no_recompiles(result, graphs, "generation")
    take_times(trio, result, lambda: decode(got), lambda: decode(eager))
    take_peaks(trio, result, lambda: got.prefill(prompt), lambda: eager.prefill(prompt))


def run_case(name: str, backend: str, dtype: str, dynamic: bool, size: str, rounds: int = 5) -> Result:
    """One line of the report; an exception is one way to fail. `rounds`: of time and memory."""
    result = Result(name, backend, dtype, dynamic, size)
    torch._dynamo.reset()
    gc.collect()
    counters.clear()
    try:
        trio = make_trio(CASES[name], backend, DTYPES[dtype], dynamic, size, rounds, result)
        (check_generation if trio.case.generates else check_ordinary)(trio, result)
        # With dynamic sizes, generation alone takes three lengths; training at them is the other models' part.
        if trio.case.generates and trio.exact is not None and not dynamic:
            check_training(trio, result)
    except Exception as error:  # whatever it is, the report goes on with the next model
        result.fail("".join(traceback.format_exception(error, limit=-4)).rstrip())
    seen = counters["dicp"]
    result.kernels, result.library, result.extern = (
        int(seen[key]) if seen else None for key in ("kernels", "library", "extern")
    )
    result.graphs = graphs_compiled()
    return result


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="run_test_model.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=[*CASES, "all"])
    parser.add_argument("backend", choices=BACKENDS)
    parser.add_argument("dynamic", nargs="?", default="false", choices=["true", "false", "all"])
    parser.add_argument("--size", default="full", choices=["full", "small"])
    parser.add_argument("--dtype", default="all", choices=[*DTYPES, "all"])
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results there too")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    names = list(CASES) if args.model == "all" else [args.model]
    if problem := obstacle(names):
        print(f"error: {problem}", file=sys.stderr)
        return 2
    dtypes = list(DTYPES) if args.dtype == "all" else [args.dtype]
    dynamics = {"true": [True], "false": [False], "all": [False, True]}[args.dynamic]
    print(
        f"{args.backend}, torch {torch.__version__}, {torch.get_num_threads()} threads, size {args.size}",
        flush=True,
    )
    results = []
    for name in names:
        for dtype in dtypes:
            for dynamic in dynamics:
                result = run_case(name, args.backend, dtype, dynamic, args.size)
                results.append(result)
                print(result.line(), flush=True)
                for text in result.notes + result.problems:
                    print("    " + text.replace("\n", "\n    "), flush=True)
    if args.json:
        args.json.write_text(json.dumps([dataclasses.asdict(r) for r in results], indent=1) + "\n")
    failed = [f"{r.model} {r.dtype} {'dynamic' if r.dynamic else 'static'}" for r in results if not r.ok]
    print(
        f"FAILED: {len(failed)} of {len(results)}: {', '.join(failed)}"
        if failed
        else f"ok: all {len(results)} passed"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

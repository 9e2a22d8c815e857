"""Generate text with LLaMA under eager PyTorch, Inductor and dicp_cpu: the tokens must agree; times in a
table.

    python scripts/generate.py [--size small] [--dtype bf16] [--backends eager,dicp_cpu] [--keep-caches]

LLAMA_MODEL_DIR names a checkpoint to load (with its tokenizer, text is generated); otherwise the real
architecture with 4 layers, hidden size 1024 and random weights. Compile seconds are with empty caches,
unless those are kept."""

import argparse
import contextlib
import os
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

CACHES = ("TORCHINDUCTOR_CACHE_DIR", "DICP_CACHE_DIR")


@dataclass(frozen=True)
class Run:
    """One backend's generation."""

    tokens: Any
    decode: Any
    prefill: Any
    compile_s: float


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="full", choices=["full", "small"])
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--backends", default="eager,inductor,dicp_cpu")
    parser.add_argument("--keep-caches", action="store_true", help="compile with the caches as they are")
    return parser.parse_args()


def generate(model: Any, backend: str, dtype: Any, ids: Any, count: int) -> Run:
    """Prefill and decode under one backend; the models share their parameters."""
    from dicp.bench import arms, contestants, measure

    contestants.get(backend).load()
    decoder = arms.Decoder(arms.compiled_arm(model, backend, dtype), ids.shape[1] + count)

    def decode() -> None:
        decoder.rewind(ids.shape[1])
        decoder.feed(ids[:, -1:])

    def prefill() -> None:
        decoder.prefill(ids)

    first = measure.seconds(prefill) + measure.seconds(decode)
    steady = measure.seconds(prefill) + measure.seconds(decode)
    return Run(decoder.generate(ids, count), decode, prefill, max(0.0, first - steady))


def main() -> int:
    args = parse()
    with contextlib.ExitStack() as stack:
        if not args.keep_caches:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            for name in CACHES:
                os.environ[name] = os.path.join(folder, name)
        return run(args)


def run(args: argparse.Namespace) -> int:
    import torch

    from dicp.bench import arms, contestants, measure
    from dicp.bench.models import CASES, obstacle
    from dicp.bench.models.text import LLAMA_NEW_TOKENS, llama_dir, tokenizer
    from dicp.bench.run import machine
    from dicp.bench.workloads import DTYPES

    backends = args.backends.split(",")
    unknown = [name for name in backends if not contestants.known(name)]
    problem = f"no such backend: {', '.join(unknown)}" if unknown else obstacle(["llama"])
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    dtype, count = DTYPES[args.dtype], LLAMA_NEW_TOKENS[args.size]
    print(", ".join(f"{k} {v}" for k, v in machine().items()))
    model = arms.cast(CASES["llama"].build(args.size), dtype)
    ids = CASES["llama"].inputs(args.size, 0, dtype)["input_ids"]
    layers, width = model.config.num_hidden_layers, model.config.hidden_size
    print(
        f"LLaMA, {layers} layers, hidden {width}, {llama_dir() or 'random weights'}, {args.dtype};", end=" "
    )
    print(f"prompt of {ids.shape[1]} tokens, {count} generated, greedy, batch 1")
    runs: dict[str, Run] = {}
    for backend in backends:
        print(f"  {backend} ...", file=sys.stderr, flush=True)
        runs[backend] = generate(model, backend, dtype, ids, count)
    decode = measure.alternating([r.decode for r in runs.values()])
    prefill = measure.alternating([r.prefill for r in runs.values()], rounds=5)
    expected = next(iter(runs.values())).tokens
    print(f"\n{'backend':<12}{'ms per token':>13}{'prefill ms':>12}{'compile s':>11}   tokens")
    failed = []
    for (backend, result), token_ms, prompt_ms in zip(runs.items(), decode, prefill):
        agreeing = int((result.tokens == expected).long().cumprod(1).sum())
        verdict = "agree" if agreeing == count else f"differ from token {agreeing}"
        if agreeing < count:
            failed.append(backend)
        compiled = "-" if backend == "eager" else f"{result.compile_s:.1f}"
        print(f"{backend:<12}{token_ms:>13.2f}{prompt_ms:>12.1f}{compiled:>11}   {verdict}")
    reader = tokenizer()
    if reader is not None:
        last = list(runs.values())[-1]
        print("\n" + reader.decode(torch.cat([ids, last.tokens], 1)[0], skip_special_tokens=True))
    if failed and dtype == torch.float32:
        print(f"\nFAILED: {', '.join(failed)} did not generate eager's tokens")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

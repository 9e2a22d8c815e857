"""Every architecture that transformers knows, small and with random weights, under a backend: what a forward
and a backward compiled from it give is held to eager's by the rule of checks.py.

One process each, so that one that crashes or hangs is one line of the report. An architecture whose default
configuration cannot be made small, or whose call needs inputs that are not guessed here, is left out and says
why. Where results are random or there is no float64 run to compare with, only dtypes and ranks are compared.

    bash test/model/run_test_architectures.sh [REGEX] [backend] [--dynamic] [--jobs N] [--results FILE]

--results: lines of JSON; what is there already is not run again.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from model import checks

SECONDS = 900  # for one architecture
MOST = 100_000_000  # parameters: of what stays larger, a run says nothing that a smaller one does not
VOCABULARY, TOKENS, PIXELS = 199, 24, 64

# At most so much of what configurations call by these names.
LIMITS: dict[str, int] = {
    **dict.fromkeys("hidden_size d_model n_embd dim embed_dim hidden_dim".split(), 64),
    **dict.fromkeys("num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers".split(), 2),
    **dict.fromkeys("num_decoder_layers num_encoder_layers top_k num_experts_per_tok moe_topk".split(), 2),
    **dict.fromkeys("num_attention_heads n_head n_heads num_heads".split(), 4),
    **dict.fromkeys("encoder_attention_heads decoder_attention_heads".split(), 4),
    **dict.fromkeys("num_experts num_local_experts n_routed_experts moe_num_experts".split(), 4),
    **dict.fromkeys("intermediate_size d_ff n_inner ffn_dim encoder_ffn_dim decoder_ffn_dim".split(), 96),
    **dict.fromkeys("d_kv head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim".split(), 16),
    **dict.fromkeys("mamba_d_head mamba_head_dim mamba_d_state".split(), 16),
    **dict.fromkeys("mamba_n_heads mamba_num_heads rotary_dim".split(), 8),
    **dict.fromkeys("max_position_embeddings n_positions n_ctx".split(), 128),
    **dict.fromkeys("q_lora_rank kv_lora_rank projection_dim".split(), 32),
    **dict.fromkeys("moe_intermediate_size shared_expert_intermediate_size".split(), 48),
    **dict.fromkeys("max_source_positions max_target_positions codebook_size".split(), 64),
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "image_size": PIXELS,
}  # fmt: skip


class LeftOut(Exception):
    """Why an architecture is not compared."""


def shrink(config: Any) -> Any:
    """The configuration, and those in it, within LIMITS."""
    from transformers import PreTrainedConfig

    given = dict(vars(config))
    ungrouped = given.get("num_key_value_heads") == given.get("num_attention_heads")
    for name, value in given.items():
        new = value
        if isinstance(value, PreTrainedConfig):
            shrink(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            limit = "num_attention_heads" if name == "num_key_value_heads" and ungrouped else name
            new = min(value, LIMITS.get(limit, value))
            if name.endswith("token_id") and value >= VOCABULARY:
                new = 0 if name.startswith("pad") else 3
        elif name == "layer_types" and isinstance(value, (list, tuple)):
            new = list(value)[:2]
        if new is not value:
            setattr(config, name, new)
    return config


def build(name: str) -> nn.Module:
    """The architecture with random weights, in eval mode; gains and biases are no constants."""
    from transformers import AutoModel
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(0)
    model = AutoModel.from_config(shrink(CONFIG_MAPPING[name]())).float().eval()
    if sum(p.numel() for p in model.parameters()) > MOST:
        raise LeftOut("large even so")
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.02)
    return model  # type: ignore[no-any-return]


def inputs_of(model: Any, batch: int = 2) -> dict[str, Any]:
    """Arguments by what the forward takes; one sequence has padding."""
    takes, main, g = inspect.signature(model.forward).parameters, model.main_input_name, torch.Generator()
    g.manual_seed(0)
    text = getattr(model.config, "get_text_config", lambda: model.config)()
    words = max(6, (getattr(text, "vocab_size", None) or VOCABULARY) - 1)
    found: dict[str, Any] = {}
    if "input_ids" in takes:
        found["input_ids"] = torch.randint(5, words, (batch, TOKENS), generator=g)
        if "attention_mask" in takes:
            found["attention_mask"] = torch.ones(batch, TOKENS, dtype=torch.long)
            found["attention_mask"][0, -5:] = 0
    if "decoder_input_ids" in takes:
        found["decoder_input_ids"] = torch.randint(5, words, (batch, TOKENS // 2), generator=g)
    if "pixel_values" in takes and (main == "pixel_values" or "pixel_values" in _required(takes)):
        vision = getattr(model.config, "vision_config", model.config)
        side = getattr(vision, "image_size", None) or PIXELS
        sides = side if isinstance(side, (list, tuple)) else (side, side)
        channels = getattr(vision, "num_channels", None) or 3
        found["pixel_values"] = torch.randn(batch, channels, *sides, generator=g)
    if main == "input_values":
        found["input_values"] = torch.randn(batch, 4000, generator=g)
    if main == "input_features":
        bands = getattr(model.config, "num_mel_bins", None) or 80
        found["input_features"] = torch.randn(batch, bands, 128, generator=g)
    if "use_cache" in takes:
        found["use_cache"] = False
    return found


def _required(takes: Any) -> set[str]:
    return {n for n, p in takes.items() if p.default is inspect.Parameter.empty}


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of nested results, by where they are."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, (dict, list, tuple)):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(one, f"{path}.{key}")


def results(call: Callable[..., Any], inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Of an inference call."""
    with torch.no_grad():
        return dict(leaves(call(**inputs)))


def gradients(call: Callable[..., Any], model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Of the mean squares of all results, by parameter."""
    model.zero_grad()
    found = [t for _, t in leaves(call(**inputs)) if t.is_floating_point() and t.requires_grad]
    sum(t.square().mean() for t in found).backward()  # type: ignore[union-attr]
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def examine(name: str, backend: str, dynamic: bool = False) -> dict[str, Any]:
    """One line of the report."""
    found: dict[str, Any] = {"name": name, "status": "ok", "problems": []}
    start = time.perf_counter()
    try:
        model = build(name)
        inputs = inputs_of(model)
        eager = {"result": results(model, inputs), "gradient": gradients(model, model, inputs)}
    except Exception as error:  # whatever a model refuses its guessed inputs with
        return found | {"status": "left out", "problems": [f"{type(error).__name__}: {error}"[:300]]}
    true, why = exactly(model, inputs, eager["result"])
    if why:
        found["status"] = f"ok, values not compared ({why})"
    compiled = torch.compile(model, backend=backend, dynamic=dynamic or None)
    for what in eager:
        try:
            got = results(compiled, inputs) if what == "result" else gradients(compiled, model, inputs)
        except Exception as error:  # any failure is a finding
            found["problems"].append(f"{what}: {type(error).__name__}: {error}"[:1500])
            continue
        if true is None:
            found["problems"] += unlike(what, got, eager[what])
        else:  # small models are full of routers and ReLUs: their gradients have kinks
            kinks = what == "gradient"
            verdicts = checks.judge_group(what, got, [eager[what]], true[what], kinks=kinks)
            found["problems"] += [str(v) for v in verdicts if not v.ok]
    if found["problems"]:
        found["status"] = "FAIL"
    found["externs"] = {k[7:]: v for k, v in counters["dicp"].items() if k.startswith("extern:")}
    found["breaks"], found["seconds"] = sum(counters["graph_break"].values()), time.perf_counter() - start
    return found


def exactly(
    model: nn.Module, inputs: dict[str, Any], eager: dict[str, Tensor]
) -> tuple[dict[str, dict[str, Tensor]] | None, str]:
    """The results and gradients in float64; None, and why, where there are none to compare with."""
    again = results(model, inputs)
    if not all(torch.equal(t.nan_to_num(), again[k].nan_to_num()) for k, t in eager.items()):
        return None, "random"
    tensors = checks.to_double({k: v for k, v in inputs.items() if isinstance(v, Tensor)})
    wide = {**inputs, **tensors}
    try:
        with checks.in_double():
            exact = checks.exact_copy(model)
            if hasattr(exact, "set_experts_implementation"):
                exact.set_experts_implementation("eager")  # the default's grouped product has no float64
            true = {"result": results(exact, wide), "gradient": gradients(exact, exact, wide)}
    except Exception as error:  # some operators have no float64
        return None, f"no float64: {error}"[:100]
    # a mask that is the least float32 leaves rows without a key in float64
    if any(true["result"][k].isnan().any() and not t.isnan().any() for k, t in eager.items()):
        return None, "NaN in float64 alone"
    return true, ""


def unlike(what: str, got: dict[str, Tensor], eager: dict[str, Tensor]) -> list[str]:
    """Differences in what there is, and of which dtype and rank: sizes may be random too."""

    def kinds(run: dict[str, Tensor]) -> dict[str, str]:
        return {k: f"{t.dtype} of {t.dim()} dimensions" for k, t in run.items()}

    ours, theirs = kinds(got), kinds(eager)
    keys = sorted(k for k in ours.keys() | theirs.keys() if ours.get(k) != theirs.get(k))
    return [f"{what} {k}: {ours.get(k)}, eager's {theirs.get(k)}" for k in keys[:5]]


def in_process(name: str, backend: str, dynamic: bool) -> dict[str, Any]:
    """`examine` in a process of its own."""
    command = [sys.executable, "-m", "model.architectures", "--one", name, backend]
    try:
        done = subprocess.run(
            command + ["--dynamic"] * dynamic, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return {"name": name, "status": "FAIL", "problems": [f"not done after {SECONDS} s"]}
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"name"')]
    if lines:
        return json.loads(lines[-1])  # type: ignore[no-any-return]
    return {"name": name, "status": "FAIL", "problems": [f"exit {done.returncode}: {done.stderr[-1500:]}"]}


def line(found: dict[str, Any]) -> str:
    """As the report shows it."""
    externs = "".join(f"  extern {op} x{n}" for op, n in found.get("externs", {}).items())
    breaks = f"  {found['breaks']} graph breaks" if found.get("breaks") else ""
    return "\n    ".join([f"{found['name']:<28}{found['status']}{externs}{breaks}", *found["problems"]])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="run_test_architectures.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="?", default=".", help="a regular expression")
    parser.add_argument("backend", nargs="?", default="dicp_cpu")
    parser.add_argument("--dynamic", action="store_true", help="sizes are symbolic")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--results", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        print(json.dumps(examine(args.names, args.backend, args.dynamic)), flush=True)
        os._exit(0)  # a model's own threads are not waited for
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    known = args.results.read_text().splitlines() if args.results and args.results.exists() else []
    done = {found["name"]: found for found in map(json.loads, known)}
    names = [n for n in MODEL_MAPPING_NAMES if re.search(args.names, n)]
    with ThreadPoolExecutor(args.jobs) as pool:
        todo = [n for n in names if n not in done]
        for found in pool.map(lambda n: in_process(n, args.backend, args.dynamic), todo):
            done[found["name"]] = found
            print(line(found), flush=True)
            if args.results:
                with args.results.open("a") as file:
                    file.write(json.dumps(found) + "\n")
    count = Counter(done[n]["status"].partition(" (")[0] for n in names)
    print(", ".join(f"{n} {status}" for status, n in count.most_common()))
    return 1 if count["FAIL"] else 0


if __name__ == "__main__":
    sys.exit(main())

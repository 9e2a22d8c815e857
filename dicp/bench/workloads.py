"""What is measured: a workload, set up for one contestant, is a call without arguments."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dicp.bench import arms
from dicp.bench.models import CASES, LARGE, Case, zoo
from dicp.bench.models.case import Inputs

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PHASES = ("inference", "training")
ROOM = 64
"""Tokens that a decoder's cache has room for behind the prompt."""
Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Setting:
    """Under which conditions: the same for all contestants."""

    phase: str
    dtype: str
    size: str = "full"
    channels_last: bool = False
    device: str = "cpu"
    batch: int = 1
    """How many times what a model is given elsewhere."""

    @property
    def wait(self) -> Callable[[], None]:
        """Returns when all that was called is done."""
        return torch.cuda.synchronize if self.device == "cuda" else lambda: None


@dataclass(frozen=True)
class Workload:
    """A model and what is done with it.

    make(contestant, setting): the call; it gives scores (inference) or the loss (training).
    """

    name: str
    case: Case
    phases: tuple[str, ...]
    make: Callable[[Case, str, Setting], Call]
    unit: str
    work: Callable[[Inputs], float]

    def call(self, contestant: str, setting: Setting) -> Call:
        return self.make(self.case, contestant, setting)

    def amount(self, setting: Setting) -> float:
        """How many of `unit` a call gets through."""
        return self.work(_inputs(self.case, setting))


def _model(case: Case, setting: Setting) -> nn.Module:
    with torch.device(setting.device):
        model = arms.cast(case.build(setting.size), DTYPES[setting.dtype]).to(setting.device)
    return model.to(memory_format=torch.channels_last) if setting.channels_last else model


def _inputs(case: Case, setting: Setting) -> Inputs:
    inputs = case.inputs(setting.size, 0, DTYPES[setting.dtype])
    inputs = {k: v.repeat(setting.batch, *[1] * (v.dim() - 1)) for k, v in inputs.items()}
    if setting.channels_last:
        wide = torch.channels_last
        inputs = {k: v.contiguous(memory_format=wide) if v.dim() == 4 else v for k, v in inputs.items()}
    return {k: v.to(setting.device) for k, v in inputs.items()}


def _once(case: Case, contestant: str, setting: Setting) -> Call:
    """An inference call; or a training step: forward, backward, SGD with momentum. The model is compiled, the
    optimizer eager for everybody."""
    training = setting.phase == "training"
    arm = arms.compiled_arm(_model(case, setting), contestant, DTYPES[setting.dtype], training=training)
    inputs = _inputs(case, setting)
    if not training:
        return lambda: arms.scores(arm, inputs)
    step = arms.trainer(arm, case, inputs, rate=1e-5)
    return lambda: step().loss


def _decode(case: Case, contestant: str, setting: Setting) -> Call:
    """One token after the prompt and those before it, batch 1, static key-value cache."""
    prompt = _inputs(case, setting)["input_ids"]
    arm = arms.compiled_arm(_model(case, setting), contestant, DTYPES[setting.dtype])
    return arms.Decoder(arm, prompt.shape[1] + ROOM).step(prompt)


def _workloads() -> dict[str, Workload]:
    found = {}
    for case in (*CASES.values(), *LARGE.values()):
        found[case.name] = Workload(case.name, case, PHASES, _once, case.unit, case.work)
        if case.generates:
            name = case.name + "-decode"
            found[name] = Workload(name, case, PHASES[:1], _decode, "tokens", lambda inputs: 1)
    return found


WORKLOADS = _workloads()
STANDARD = tuple(w.name for w in WORKLOADS.values() if w.case.name in CASES)


def known(name: str) -> bool:
    """Whether it names a workload, as far as can be said without building it."""
    return name in WORKLOADS or name.startswith(zoo.PREFIX)


def workload(name: str) -> Workload:
    """One of WORKLOADS, or a model of timm (`timm:...`). KeyError for other names."""
    if not name.startswith(zoo.PREFIX):
        return WORKLOADS[name]
    case = zoo.case(name)
    return Workload(name, case, PHASES, _once, case.unit, case.work)


@dataclass(frozen=True)
class Cost:
    """What a call has to do at the least: floating operations of products and convolutions, and bytes of
    weights to read (tables that are only looked up not counted)."""

    flops: int
    weight_bytes: int


def _attention_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """Of two products, by the shapes [B, heads, L, D] of the operands."""
    batch, heads, rows, width = q
    return 2 * batch * heads * rows * k[2] * (width + v[3])


def _attention_backward_flops(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """Five products, one of them the forward's first again."""
    return 5 * _attention_flops(q, k, v) // 2


def _grouped_flops(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """Of products of groups of rows, of columns or of the summed axis: each element belongs to one group."""
    batch = a[0] if len(a) == len(b) == 3 else 1
    return 2 * batch * a[-2] * a[-1] * b[-1]  # type: ignore[no-any-return]


def cost(workload: Workload, setting: Setting) -> Cost:
    """Counted under eager."""
    from torch.utils.flop_counter import FlopCounterMode

    aten = torch.ops.aten
    # what the counter does not know of itself
    mapping: dict[Any, Callable[..., int]] = {aten._grouped_mm: _grouped_flops}
    for kind in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"):
        # it knows some, but not with heads that share keys
        mapping[getattr(aten, f"_scaled_dot_product_{kind}")] = _attention_flops
        mapping[getattr(aten, f"_scaled_dot_product_{kind}_backward")] = _attention_backward_flops
    call = workload.call("eager", setting)
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        call()
    model = _model(workload.case, setting)
    looked_up = {m.weight.data_ptr() for m in model.modules() if isinstance(m, nn.Embedding)}
    looked_up -= {m.weight.data_ptr() for m in model.modules() if isinstance(m, nn.Linear)}
    weights = sum(p.nbytes for p in model.parameters() if p.data_ptr() not in looked_up)
    del call, model
    gc.collect()
    return Cost(counter.get_total_flops(), weights)

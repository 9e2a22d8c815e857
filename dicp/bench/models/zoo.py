"""Any image model of timm, by its name there: `timm:swin_tiny_patch4_window7_224`."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor, nn

from dicp.bench.models.case import Case, Inputs, class_targets, images_in, seeded

PREFIX = "timm:"
SET = """efficientnet_b0 mobilenetv3_large_100 regnety_008 densenet121 swin_tiny_patch4_window7_224
    resnext50_32x4d nfnet_l0 convmixer_768_32 mixer_s16_224 vgg11_bn poolformer_s12""".split()
"""Image models of many kinds, for none of which dicp is tuned: what a change does to others."""
SMALL_BATCH, BATCH = 1, 2


def problem(name: str) -> str | None:
    """Why the model `timm:...` cannot be built here, and what to do; None when it can."""
    if importlib.util.find_spec("timm") is None:
        return f"{name}: timm is not installed; pip install timm, and the torchvision made for this torch"
    import timm

    if timm.is_model(name.removeprefix(PREFIX)):
        return None
    near = ", ".join(timm.list_models(f"*{name.removeprefix(PREFIX)}*")[:5])
    return f"{name}: timm {timm.__version__} has no such model" + (f"; it has {near}" if near else "")


def build(name: str) -> nn.Module:
    """The model with random weights, in float32 and eval mode."""
    import timm

    torch.manual_seed(0)
    model: nn.Module = timm.create_model(name.removeprefix(PREFIX), pretrained=False).float().eval()
    return unsettled(model)


def unsettled(model: nn.Module) -> nn.Module:
    """The model with gains, biases and running statistics that are no constants, as training leaves them."""
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.02)
        for key, buffer in model.named_buffers():
            if key.endswith("running_mean"):
                buffer.add_(torch.randn_like(buffer) * 0.02)
            elif key.endswith("running_var"):
                buffer.mul_(1 + 0.1 * torch.rand_like(buffer))
    return model


def images(name: str, batch: int) -> Tensor:
    """A batch of the size that the model is made for: [batch, channels, height, width]."""
    from timm.models import get_pretrained_cfg

    config = get_pretrained_cfg(name.removeprefix(PREFIX))
    return torch.randn(batch, *(config.input_size if config else (3, 224, 224)), generator=seeded(0))


def case(name: str) -> Case:
    """As the benchmark takes it. There is one size of it: "small" is a smaller batch."""

    def inputs(size: str, variant: int, dtype: torch.dtype) -> Inputs:
        return {"x": images(name, SMALL_BATCH if size == "small" else BATCH + variant).to(dtype)}

    return Case(
        name, lambda size: build(name), inputs, class_targets, unit="images", work=images_in,
        needs_transformers=False,
    )  # fmt: skip

"""Models of images and of sound: convolutions, transformers, and both."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dicp.bench.models.case import Inputs, seeded

RESNET_SHAPES = {"full": ((2, 224), (3, 224), (2, 256)), "small": ((2, 64), (3, 64), (2, 96))}


def build_resnet50(size: str) -> nn.Module:
    """ResNet-50 itself (full); two units a stage and a quarter of the width (small).

    Each unit's branch starts small beside what it skips to, as in a trained network. With branches as
    large, a random network amplifies rounding so much that eager's own bf16 gradients have errors larger
    than themselves."""
    from dicp.bench.models.resnet import Bottleneck, ResNet, resnet50

    torch.manual_seed(0)
    model = resnet50() if size == "full" else ResNet((2, 2, 2, 2), width=16, classes=10)
    for unit in model.modules():
        if isinstance(unit, Bottleneck):
            nn.init.constant_(unit.bn3.weight, 0.2)
    return model.eval()


def resnet50_inputs(size: str, variant: int, dtype: torch.dtype) -> Inputs:
    batch, pixels = RESNET_SHAPES[size][variant]
    return {"x": torch.randn(batch, 3, pixels, pixels, generator=seeded(variant)).to(dtype)}


def build_vit(size: str) -> nn.Module:
    """ViT-B/16 at 224 pixels (full)."""
    from transformers import ViTConfig, ViTForImageClassification

    small = dict(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=32,
        patch_size=8,
    )
    config = ViTConfig(
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=1000 if size == "full" else 10,
        **({} if size == "full" else small),
    )  # fmt: skip
    torch.manual_seed(0)
    return ViTForImageClassification(config).eval()


# ------------------------------------------------------------------------------- mobilenet_v2, convnext
def build_mobilenet_v2(size: str) -> nn.Module:
    """MobileNetV2 at width 1.0 and 224 pixels (full); a quarter of the width (small). Its convolutions keep
    the size of what passes, where transformers' random ones let it vanish."""
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    config = MobileNetV2Config(
        tf_padding=False, classifier_dropout_prob=0.0, num_labels=1000 if size == "full" else 10,
        **({} if size == "full" else dict(depth_multiplier=0.25, finegrained_output=False)),
    )  # fmt: skip
    torch.manual_seed(0)
    model = MobileNetV2ForImageClassification(config).eval()
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
    return model


def build_convnext(size: str) -> nn.Module:
    """ConvNeXt-T (full); two stages of one block, narrow (small). Its branches count, as in a trained
    network: the architecture starts them at a millionth."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    small = dict(num_stages=2, hidden_sizes=[16, 32], depths=[1, 1], num_labels=10)
    config = ConvNextConfig(
        layer_scale_init_value=0.2, **(dict(num_labels=1000) if size == "full" else small)
    )
    torch.manual_seed(0)
    return ConvNextForImageClassification(config).eval()


def pixel_inputs(full: int, small: int, batch: int = 2) -> Callable[[str, int, torch.dtype], Inputs]:
    """Batches of random images with so many pixels a side; variants are larger batches."""

    def inputs(size: str, variant: int, dtype: torch.dtype) -> Inputs:
        pixels = full if size == "full" else small
        shape = (batch + variant, 3, pixels, pixels)
        return {"pixel_values": torch.randn(shape, generator=seeded(variant)).to(dtype)}

    return inputs


# ------------------------------------------------------------------------------------------------ unet
def build_unet(size: str) -> nn.Module:
    """The denoiser of a latent-diffusion model: widths 128, 256, 512 (full)."""
    from dicp.bench.models.unet import UNet

    torch.manual_seed(0)
    return (UNet() if size == "full" else UNet(channels=(16, 32), heads=2, groups=4)).eval()


def unet_inputs(size: str, variant: int, dtype: torch.dtype) -> Inputs:
    """Noisy latents [B, 4, 64, 64] (small: 16 x 16) and the step of each."""
    side = 64 if size == "full" else 16
    x = torch.randn(1 + variant, 4, side, side, generator=seeded(variant)).to(dtype)
    return {"x": x, "t": torch.arange(x.shape[0]) * 100 + 7}


def noise_targets(inputs: Inputs) -> Tensor:
    """The noise that is to be found."""
    return torch.randn(inputs["x"].shape, generator=seeded(5))


# --------------------------------------------------------------------------------------------- whisper
def build_whisper(size: str) -> nn.Module:
    """Whisper-tiny: 4 layers each way of width 384, 30 s of sound (full)."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    tiny = dict(
        d_model=384, encoder_layers=4, decoder_layers=4, encoder_attention_heads=6, decoder_attention_heads=6,
        encoder_ffn_dim=1536, decoder_ffn_dim=1536,
    )  # fmt: skip
    small = dict(
        d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=128, decoder_ffn_dim=128, max_source_positions=32, vocab_size=500, pad_token_id=0,
        bos_token_id=0, eos_token_id=0, decoder_start_token_id=0,
    )  # fmt: skip
    config = WhisperConfig(dropout=0.0, use_cache=False, **(tiny if size == "full" else small))
    torch.manual_seed(0)
    return WhisperForConditionalGeneration(config).eval()


def whisper_inputs(size: str, variant: int, dtype: torch.dtype) -> Inputs:
    """Log-mel features of 30 s (small: 64 frames), and 32 tokens said so far."""
    frames, top = (3000, 51865) if size == "full" else (64, 500)
    batch, tokens = (1 if size == "full" else 2) + variant, 32 + 4 * variant
    return {
        "input_features": torch.randn(batch, 80, frames, generator=seeded(variant)).to(dtype),
        "decoder_input_ids": torch.randint(0, top, (batch, tokens), generator=seeded(variant)),
    }


def seconds_of_sound(inputs: Inputs) -> float:
    """A feature frame is a hundredth of a second."""
    features = inputs["input_features"]
    return features.shape[0] * features.shape[2] / 100

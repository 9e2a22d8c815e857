"""Where architectures come from: what a library calls them, how one is built with random weights, and what
goes in."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dicp.bench.models import zoo

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


class LeftOut(Exception):
    """Why an architecture is not compared."""


def _small_enough(model: nn.Module) -> nn.Module:
    if sum(p.numel() for p in model.parameters()) > MOST:
        raise LeftOut("large even so")
    return model


def build_transformers(name: str) -> nn.Module:
    """The architecture with random weights, in eval mode; gains and biases are no constants."""
    from transformers import AutoModel
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(0)
    model = AutoModel.from_config(shrink(CONFIG_MAPPING[name]())).float().eval()
    return zoo.unsettled(_small_enough(model))


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


# Of each file of timm 1.0.31 a model of few parameters; none where the smallest has more than MOST.
SMALL = """
    beit_base_patch16_224 halonet_h1 mobileone_s1 cait_xxs24_224 coat_tiny convit_tiny convmixer_768_32
    convnext_atto cpubone_nano crossvit_tiny_240 csatv2 cs3darknet_focus_s cspnext_tiny davit_tiny
    deit_tiny_patch16_224 densenet121 dla46x_c dpn48b edgenext_xx_small efficientformer_l1
    efficientformerv2_s0 efficientnet_lite0 efficientvim_m1 efficientvit_b0 efficientvit_m0
    vit_tiny_patch16_dinov3_qkvb fasternet_t0 fastvit_t8 focalnet_tiny_srf gcvit_xxtiny ghostnet_050
    hardcorenas_b hgnetv2_b0 hiera_tiny_224 sam2_hiera_tiny hrnet_w18_small iformer_t inception_next_atto
    inception_resnet_v2 inception_v3 inception_v4 lcnetv2_small levit_128s lowformer_b0 mambaout_femto
    maxvit_pico_rw_256 poolformerv2_s12 gmlp_ti16_224 mobilenetv3_small_050 mobilenetv5_base mobilevit_xxs
    mvitv2_tiny naflexvit_base_patch16_parfac_gap nasnetalarge nest_tiny nextvit_small nfnet_l0 pit_ti_224
    pnasnet5large pvt_v2_b0 qwen3_vit_88m rdnet_tiny regnetx_002 repghostnet_050 repvit_m1 res2next50
    resnest14d resnet10t resnetv2_18 rexnet_100 selecsls42 legacy_seresnet18 sequencer2d_s shvit_s1
    skresnet18 starnet_s050 swiftformer_xs swin_tiny_patch4_window7_224 swinv2_tiny_window16_256
    swinv2_cr_tiny_224 tiny_vit_5m_224 tnt_s_legacy_patch16_224 tresnet_m twins_svt_small
    visformer_tiny vit_tiny_patch16_224 vit_tiny_r_s16_p8_224 vit_relpos_small_patch16_224
    samvit_base_patch16_224 vitamin_small_224 volo_d1_224 ese_vovnet19b_slim_dw legacy_xception xception41p
    xcit_nano_12_p8_224
"""


def build_timm(name: str) -> nn.Module:
    """At its own size, with random weights, in eval mode."""
    return _small_enough(zoo.build(zoo.PREFIX + name))


def images_of(model: Any) -> dict[str, Any]:
    """Two images of the size that the model is made for."""
    return {"x": zoo.images(zoo.PREFIX + model.default_cfg["architecture"], 2)}


def _transformers() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return list(MODEL_MAPPING_NAMES)


@dataclass(frozen=True)
class Library:
    """names(): the architectures that are looked at; a name that is not among them may be built all the same.
    build(name): a model with random weights, in eval mode. inputs(model): what its forward takes.
    trains: gradients are those of training mode, with statistics of the batch; else dropout would be in the way.
    """

    names: Callable[[], Iterable[str]]
    build: Callable[[str], nn.Module]
    inputs: Callable[[Any], dict[str, Any]]
    trains: bool

    def matching(self, pattern: str) -> list[str]:
        """The names that a regular expression finds; without any, the expression is a name."""
        return [n for n in self.names() if re.search(pattern, n)] or [pattern]


LIBRARIES = {
    "transformers": Library(_transformers, build_transformers, inputs_of, trains=False),
    "timm": Library(SMALL.split, build_timm, images_of, trains=True),
}

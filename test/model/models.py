"""The models: how each is built, what goes in, at which sizes. Random weights with a fixed seed, real
architectures."""

import importlib.util
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One model.

    build(size): the model in float32, "full" or "small".
    inputs(size, variant, dtype): keyword arguments of forward; variants 0, 1, 2 differ in shape.
    targets(inputs): class numbers for the loss, shaped as the scores without their last dimension.
    steps: SGD steps that a training run takes (0: not trained).
    kinks: its function has them (ReLU, max-pooling), which the fp64 rule has to know (checks.py).
    generates: a language model that is run with a static key-value cache.
    """

    name: str
    build: Callable[[str], nn.Module]
    inputs: Callable[[str, int, torch.dtype], Inputs]
    targets: Callable[[Inputs], Tensor] | None = None
    steps: int = 1
    kinks: bool = False
    generates: bool = False


def seeded(seed: int) -> torch.Generator:
    """A generator of its own, so that inputs depend on nothing but their seed."""
    return torch.Generator().manual_seed(seed)


def scores_of(output: Any) -> Tensor:
    """The class scores in a model's output."""
    return output if isinstance(output, Tensor) else output.logits


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy, in float32 whatever the scores' dtype."""
    return nn.functional.cross_entropy(scores.float().flatten(0, -2), targets.flatten())


# ----------------------------------------------------------------------------------------------- llama
LLAMA_NEW_TOKENS = {"full": 64, "small": 8}
LLAMA_PROMPTS = {"full": (128, 96, 157), "small": (14, 12, 21)}


def llama_dir() -> str | None:
    """The real checkpoint to use, if the user names one."""
    return os.environ.get("LLAMA_MODEL_DIR") or None


def build_llama(size: str) -> nn.Module:
    """LLaMA with grouped-query attention: 4 layers of hidden size 1024 (full), or a checkpoint's own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = llama_dir()
    if directory:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    if size == "full":
        config = LlamaConfig(
            hidden_size=1024, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=8,
            intermediate_size=2752, vocab_size=32000, max_position_embeddings=2048,
        )  # fmt: skip
    else:
        config = LlamaConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=176, vocab_size=512, max_position_embeddings=128,
        )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


PROMPT = (
    "The history of computing is a history of abstraction. Each generation of engineers took what the one "
    "before had built, gave it a name, and used it without thinking about it again. First came the "
    "machines that were wired by hand for every problem; then came the idea that a program is data like "
    "any other; and then, one after another, the languages that let people say what they meant. Compilers "
    "were at first distrusted. Nobody believed that a machine could write code as good as what a person "
    "would write, and for a while they were right. What changed their minds was not an argument but a "
    "measurement: the compiled program ran as fast as the one by hand, and it had taken an afternoon "
    "instead of a month. The next step, many thought, would be"
)


def tokenizer() -> Any | None:
    """The tokenizer of the real checkpoint, if there is one."""
    directory = llama_dir()
    if not directory:
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError, ImportError):
        return None


def llama_vocabulary(size: str) -> int:
    """How many tokens there are."""
    directory = llama_dir()
    if directory:
        from transformers import AutoConfig

        return int(AutoConfig.from_pretrained(directory).vocab_size)
    return 32000 if size == "full" else 512


def llama_inputs(size: str, variant: int, dtype: torch.dtype) -> Inputs:
    """A prompt of 128 tokens (full, variant 0): text where there is a tokenizer, else random token
    numbers."""
    length = LLAMA_PROMPTS[size][variant]
    reader = tokenizer()
    if reader is not None:
        ids = reader(PROMPT, return_tensors="pt").input_ids
        return {"input_ids": ids.repeat(1, -(-length // ids.shape[1]))[:, :length]}
    return {"input_ids": torch.randint(0, llama_vocabulary(size), (1, length), generator=seeded(variant))}


# -------------------------------------------------------------------------------------------- resnet50
RESNET_SHAPES = {"full": ((2, 224), (3, 224), (2, 256)), "small": ((2, 64), (3, 64), (2, 96))}


def build_resnet50(size: str) -> nn.Module:
    """ResNet-50 itself (full); two units a stage and a quarter of the width (small).

    Each unit's branch starts small beside what it skips to, as in a trained network. With branches as
    large, a random network amplifies rounding so much that eager's own bf16 gradients have errors larger
    than themselves."""
    from model.resnet import Bottleneck, ResNet, resnet50

    torch.manual_seed(0)
    model = resnet50() if size == "full" else ResNet((2, 2, 2, 2), width=16, classes=10)
    for unit in model.modules():
        if isinstance(unit, Bottleneck):
            nn.init.constant_(unit.bn3.weight, 0.2)
    return model


def resnet50_inputs(size: str, variant: int, dtype: torch.dtype) -> Inputs:
    batch, pixels = RESNET_SHAPES[size][variant]
    return {"x": torch.randn(batch, 3, pixels, pixels, generator=seeded(variant)).to(dtype)}


# ------------------------------------------------------------------------------------------ bert, gpt2
TEXT_SHAPES = {"full": ((2, 128), (3, 96), (4, 144)), "small": ((2, 16), (3, 12), (4, 20))}


def build_bert(size: str) -> nn.Module:
    """BERT-base with its masked-language-model head (full)."""
    from transformers import BertConfig, BertForMaskedLM

    small = dict(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=500
    )
    config = BertConfig(
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **({} if size == "full" else small)
    )
    torch.manual_seed(0)
    return BertForMaskedLM(config).eval()


def bert_inputs(size: str, variant: int, dtype: torch.dtype) -> Inputs:
    """Token numbers, and a mask under which the last sentence ends a few tokens earlier."""
    batch, length = TEXT_SHAPES[size][variant]
    ids = torch.randint(0, 30522 if size == "full" else 500, (batch, length), generator=seeded(variant))
    mask = torch.ones_like(ids)
    mask[-1, -length // 4 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def build_gpt2(size: str) -> nn.Module:
    """GPT-2 small, 124 M parameters (full)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    small = dict(
        n_embd=64, n_layer=2, n_head=4, vocab_size=500, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    config = GPT2Config(
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, **({} if size == "full" else small)
    )
    torch.manual_seed(0)
    return GPT2LMHeadModel(config).eval()


def gpt2_inputs(size: str, variant: int, dtype: torch.dtype) -> Inputs:
    shape = TEXT_SHAPES[size][variant]
    return {"input_ids": torch.randint(0, 50257 if size == "full" else 500, shape, generator=seeded(variant))}


# ------------------------------------------------------------------------------------------------- vit
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


def vit_inputs(size: str, variant: int, dtype: torch.dtype) -> Inputs:
    pixels = 224 if size == "full" else 32
    return {"pixel_values": torch.randn(2 + variant, 3, pixels, pixels, generator=seeded(variant)).to(dtype)}


# -------------------------------------------------------------------------------------------- registry
def token_targets(inputs: Inputs) -> Tensor:
    """The tokens, moved by one."""
    return inputs["input_ids"].roll(-1, dims=1)


def class_targets(inputs: Inputs) -> Tensor:
    """Class numbers 1, 2, ... for the images of a batch."""
    images = next(iter(inputs.values()))
    return torch.arange(1, images.shape[0] + 1)


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("llama", build_llama, llama_inputs, steps=0, generates=True),
        Case("resnet50", build_resnet50, resnet50_inputs, class_targets, steps=5, kinks=True),
        Case("bert", build_bert, bert_inputs, token_targets),
        Case("gpt2", build_gpt2, gpt2_inputs, token_targets),
        Case("vit", build_vit, vit_inputs, class_targets),
    )
}


def obstacle(names: Iterable[str]) -> str | None:
    """Why these models cannot be built here, and what to do; None when they can. For the driver to say before
    any is built."""
    wanted = sorted(set(names) - {"resnet50"})
    if wanted and importlib.util.find_spec("transformers") is None:
        return (
            f"{', '.join(wanted)}: transformers is not installed; run `bash scripts/setup_env.sh` and use its "
            "environment, or pip install -e '.[test]'"
        )
    directory = llama_dir()
    if "llama" not in wanted or directory is None:
        return None
    path = Path(directory)
    if not path.is_dir():
        return f"LLAMA_MODEL_DIR={directory} is no directory; unset, the model has random weights"
    if not (path / "config.json").is_file():
        return f"LLAMA_MODEL_DIR={directory} holds no config.json; it has to be a checkpoint of transformers"
    if not any([*path.glob("*.safetensors"), *path.glob("*.bin")]):
        return f"LLAMA_MODEL_DIR={directory} holds no weights (*.safetensors or *.bin)"
    return None

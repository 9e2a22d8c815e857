"""Language models: decoders (LLaMA, Qwen, Mixtral, GPT-2), an encoder (BERT), encoder and decoder (T5)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from dicp.bench.models.case import Inputs, seeded

LLAMA_NEW_TOKENS = {"full": 64, "small": 8}
LLAMA_PROMPTS = {"full": (128, 96, 157), "small": (14, 12, 21)}


def llama_dir() -> str | None:
    """The real checkpoint to use, if the user names one."""
    return os.environ.get("LLAMA_MODEL_DIR") or None


def _llama(**widths: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(use_cache=False, **widths)).eval()


def build_llama(size: str) -> nn.Module:
    """LLaMA with grouped-query attention: 4 layers of hidden size 1024 (full), or a checkpoint's own."""
    directory = llama_dir()
    if directory:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        model.config.use_cache = False
        return model
    if size == "full":
        return _llama(
            hidden_size=1024, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=8,
            intermediate_size=2752, vocab_size=32000, max_position_embeddings=2048,
        )  # fmt: skip
    return _llama(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=176, vocab_size=512, max_position_embeddings=128,
    )  # fmt: skip


def build_llama_1b(size: str) -> nn.Module:
    """Llama 3.2 1B's sizes (full): weights of 2.5 GB in bf16, as people run on CPUs."""
    if size != "full":
        return build_llama(size)
    return _llama(
        hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=8192, vocab_size=128256, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip


def build_llama_7b(size: str) -> nn.Module:
    """LLaMA-2 7B (full)."""
    if size != "full":
        return build_llama(size)
    return _llama(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=32,
        intermediate_size=11008, vocab_size=32000, max_position_embeddings=4096,
    )  # fmt: skip


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


Shapes = Mapping[str, tuple[tuple[int, int], ...]]
TEXT_SHAPES: Shapes = {"full": ((2, 128), (3, 96), (4, 144)), "small": ((2, 16), (3, 12), (4, 20))}


LONG_SHAPES: Shapes = {"full": ((1, 512), (1, 384), (1, 640)), "small": TEXT_SHAPES["small"]}


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


def text_inputs(vocabulary: int, shapes: Shapes = TEXT_SHAPES) -> Callable[[str, int, torch.dtype], Inputs]:
    """Random token numbers below `vocabulary` (small: 500)."""

    def inputs(size: str, variant: int, dtype: torch.dtype) -> Inputs:
        shape, top = shapes[size][variant], vocabulary if size == "full" else 500
        return {"input_ids": torch.randint(0, top, shape, generator=seeded(variant))}

    return inputs


def build_qwen(size: str) -> nn.Module:
    """Qwen3: norms on queries and keys, heads wider than hidden size / heads, tied embeddings; the widths of
    the 0.6 B model, 4 layers, a third of its vocabulary (full)."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    full = dict(
        hidden_size=1024, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
        intermediate_size=3072, vocab_size=50000,
    )  # fmt: skip
    small = dict(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        intermediate_size=128, vocab_size=500,
    )  # fmt: skip
    config = Qwen3Config(
        max_position_embeddings=2048, tie_word_embeddings=True, use_cache=False,
        **(full if size == "full" else small),
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).eval()


def build_mixtral(size: str) -> nn.Module:
    """Mixtral's architecture: 8 experts of which each token takes 2; 2 layers of hidden size 1024 (full)."""
    from transformers import MixtralConfig, MixtralForCausalLM

    full = dict(
        hidden_size=1024, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=8,
        intermediate_size=2048, vocab_size=32000, num_local_experts=8,
    )  # fmt: skip
    small = dict(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=128, vocab_size=500, num_local_experts=4,
    )  # fmt: skip
    config = MixtralConfig(
        num_experts_per_tok=2, max_position_embeddings=2048, use_cache=False,
        **(full if size == "full" else small),
    )  # fmt: skip
    torch.manual_seed(0)
    return MixtralForCausalLM(config).eval()


def experts_one_by_one(model: nn.Module) -> None:
    """torch's grouped product, which Mixtral uses by default, has no float64."""
    model.config._experts_implementation = "eager"


def build_t5(size: str) -> nn.Module:
    """T5 1.1: relative position bias, gated GELU; the widths of T5-base, 4 layers each way (full)."""
    from transformers import T5Config, T5ForConditionalGeneration

    full = dict(
        d_model=768, d_kv=64, d_ff=2048, num_layers=4, num_decoder_layers=4, num_heads=12, vocab_size=32128
    )
    small = dict(
        d_model=64, d_kv=16, d_ff=128, num_layers=2, num_decoder_layers=2, num_heads=4, vocab_size=500
    )
    config = T5Config(
        dropout_rate=0.0, feed_forward_proj="gated-gelu", tie_word_embeddings=False, use_cache=False,
        **(full if size == "full" else small),
    )  # fmt: skip
    torch.manual_seed(0)
    return T5ForConditionalGeneration(config).eval()


def t5_inputs(size: str, variant: int, dtype: torch.dtype) -> Inputs:
    """Tokens to read, of which the last sentence has fewer, and half as many to write."""
    inputs = bert_inputs(size, variant, dtype)
    batch, length = inputs["input_ids"].shape
    top = 32128 if size == "full" else 500
    inputs["input_ids"] = inputs["input_ids"] % top
    inputs["decoder_input_ids"] = torch.randint(0, top, (batch, length // 2), generator=seeded(variant + 10))
    return inputs

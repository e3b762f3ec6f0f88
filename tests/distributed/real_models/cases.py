"""Tiny models of transformers and PEFT, built offline, and a batch for each step of each rank.

Dropout is off everywhere: ranks draw their own random numbers, so nothing else could be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import peft
import torch
import transformers
from torch import Tensor, nn

VOCABULARY = 61  # uneven on purpose: no number of ranks divides it
SEQUENCE = 10
BATCH = 2


@dataclass(frozen=True)
class Case:
    """A model and what it is trained on.

    build: a new model, the same bits at every call.
    batch: (step, rank) -> the keyword arguments of its forward, labels included.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], dict[str, Tensor]]


def generator(step: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * step + rank)


def tokens(step: int, rank: int) -> Tensor:
    """int64 [BATCH, SEQUENCE]"""
    return torch.randint(3, VOCABULARY, (BATCH, SEQUENCE), generator=generator(step, rank))


def causal_batch(step: int, rank: int) -> dict[str, Tensor]:
    ids = tokens(step, rank)
    return {"input_ids": ids, "labels": ids}


def llama_config(**changes: Any) -> transformers.LlamaConfig:
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    return transformers.LlamaConfig(**(settings | changes))


def llama(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(llama_config(**changes))


def tied_llama() -> nn.Module:
    return llama(tie_word_embeddings=True)


def checkpointed_llama(use_reentrant: bool) -> nn.Module:
    model = llama()
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": use_reentrant})
    return model


def lora_llama(checkpointed: bool = False) -> nn.Module:
    base = llama()
    if checkpointed:
        base.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": True})
        base.enable_input_require_grads()
    # init_lora_weights=False: with B = 0 half of the adapters would have no gradient in the first step
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(base, adapters)


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.GPT2LMHeadModel(config)


def t5() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def t5_batch(step: int, rank: int) -> dict[str, Tensor]:
    ids = tokens(step, rank)
    return {"input_ids": ids, "labels": ids.flip(1)[:, :7].contiguous()}


def bert() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config)


def bert_batch(step: int, rank: int) -> dict[str, Tensor]:
    ids = tokens(step, rank)
    mask = torch.ones_like(ids)
    mask[:, SEQUENCE - 1 - rank :] = 0  # ranks pad differently
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def mixtral() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        num_local_experts=4,
        num_experts_per_tok=1,
        bos_token_id=1,
        eos_token_id=2,
        experts_implementation="eager",  # visits only the experts that some token chose
    )
    return transformers.MixtralForCausalLM(config)


def mixtral_batch(step: int, rank: int) -> dict[str, Tensor]:
    """Rank 0 repeats one token, so that most of its experts see nothing."""
    ids = torch.full((BATCH, SEQUENCE), 5 + step) if rank == 0 else tokens(step, rank)
    return {"input_ids": ids, "labels": ids}


def vit() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=8,
        patch_size=4,
        num_channels=3,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=5,
    )
    return transformers.ViTForImageClassification(config)


def vit_batch(step: int, rank: int) -> dict[str, Tensor]:
    source = generator(step, rank)
    return {
        "pixel_values": torch.randn(BATCH, 3, 8, 8, generator=source),
        "labels": torch.randint(5, (BATCH,), generator=source),
    }


CASES = {
    "llama": Case(llama, causal_batch),
    "llama tied": Case(tied_llama, causal_batch),
    "llama checkpointed": Case(lambda: checkpointed_llama(use_reentrant=False), causal_batch),
    "llama checkpointed, reentrant": Case(lambda: checkpointed_llama(use_reentrant=True), causal_batch),
    "llama LoRA": Case(lora_llama, causal_batch),
    "llama LoRA checkpointed, reentrant": Case(lambda: lora_llama(checkpointed=True), causal_batch),
    "gpt2": Case(gpt2, causal_batch),
    "t5": Case(t5, t5_batch),
    "bert": Case(bert, bert_batch),
    "mixtral": Case(mixtral, mixtral_batch),
    "vit": Case(vit, vit_batch),
}

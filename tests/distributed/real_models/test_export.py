"""What transformers and PEFT write from a sharded model is the trained model."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import transformers

import onenth
from tests.distributed.interface.compare import entries_that_differ
from tests.distributed.pool import Pool
from tests.distributed.real_models.cases import CASES, llama
from tests.distributed.real_models.training import train_sharded

LOADERS = {
    "llama": transformers.LlamaForCausalLM.from_pretrained,
    "llama tied": transformers.LlamaForCausalLM.from_pretrained,
    "t5": transformers.T5ForConditionalGeneration.from_pretrained,
    "llama LoRA": lambda folder: peft.PeftModel.from_pretrained(llama(), folder),
}


def logits_after_reload(
    group: dist.ProcessGroup, name: str, folder: str, stage: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Logits of the trained sharded model, and of what was loaded from its directory; at rank 0."""
    model, _ = train_sharded(group, CASES[name], stage=stage, precision="fp32")
    model.eval()
    batch = CASES[name].batch(100, 0)
    state = onenth.full_state_dict(model, trainable_only=name == "llama LoRA")
    if group.rank() == 0:
        model.save_pretrained(folder, state_dict=state)
    logits = None
    with torch.no_grad(), onenth.gathered(model):
        if group.rank() == 0:
            logits = model(**batch).logits, LOADERS[name](folder).eval()(**batch).logits
    return logits


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", LOADERS)
def test_save_pretrained_writes_the_trained_model(pool: Pool, tmp_path: Path, name: str, stage: int) -> None:
    """`from_pretrained` of what rank 0 saved computes the very logits of the sharded model."""
    sharded, reloaded = pool.run(2, logits_after_reload, name, str(tmp_path), stage)[0]
    assert torch.equal(sharded, reloaded)
    assert not torch.equal(sharded, CASES[name].build().eval()(**CASES[name].batch(100, 0)).logits)


def entries_lost_in_bf16_export(group: dist.ProcessGroup, folder: str) -> list[str]:
    model, _ = train_sharded(group, CASES["llama"], stage=3, precision="bf16")
    master = onenth.full_state_dict(model)
    state = onenth.full_state_dict(model, dtype=torch.bfloat16)
    if group.rank() != 0:
        return []
    model.save_pretrained(folder, state_dict=state)
    written = safetensors.torch.load_file(f"{folder}/model.safetensors")
    return entries_that_differ({name: value.bfloat16() for name, value in master.items()}, written)


def test_save_pretrained_in_bf16(pool: Pool, tmp_path: Path) -> None:
    """Where `full_state_dict` was asked for bf16, the file holds the fp32 master copy rounded to bf16."""
    assert pool.run(2, entries_lost_in_bf16_export, str(tmp_path))[0] == []


def error_of_bare_save_pretrained(group: dist.ProcessGroup, name: str, folder: str) -> str:
    model, _ = train_sharded(group, CASES[name], stage=3, precision="fp32")
    with pytest.raises(onenth.ShardError) as raised:
        model.save_pretrained(f"{folder}/{group.rank()}")
    return str(raised.value)


@pytest.mark.parametrize("name", ["llama", "llama LoRA"])
def test_save_pretrained_without_a_state_raises(pool: Pool, tmp_path: Path, name: str) -> None:
    """At stage 3, `save_pretrained` without `state_dict=` names the way out and writes no weights."""
    for message in pool.run(2, error_of_bare_save_pretrained, name, str(tmp_path)):
        assert "full_state_dict" in message
    assert not list(tmp_path.rglob("*.safetensors")) + list(tmp_path.rglob("*.bin"))

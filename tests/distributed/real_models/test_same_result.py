"""Real models train at every stage as they do in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import onenth
from tests.distributed.pool import Pool
from tests.distributed.real_models.cases import CASES, mixtral, mixtral_batch, t5
from tests.distributed.real_models.training import adamw, differences_to_first, distances_to_plain

STAGES = [{"stage": stage} for stage in (0, 1, 2, 3)]
RECOMPUTE = [{"stage": stage, "activations": "recompute"} for stage in (0, 3)]


def assert_same_result(pool: Pool, ranks: int, name: str, runs: list[dict[str, Any]]) -> None:
    moved, distances = pool.run(ranks, distances_to_plain, name, runs, timeout=120)[0]
    assert moved > 1e-3, "training that moves nothing compares nothing"
    assert len(distances) == len(runs)
    assert max(distances) <= 1e-5, dict(zip(map(str, runs), distances, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_trains_as_plain_pytorch(pool: Pool, name: str) -> None:
    """Three AdamW steps on two ranks, at every stage: as one process that averages both micro-batches."""
    assert_same_result(pool, 2, name, STAGES)


def test_llama_trains_as_plain_pytorch_on_three_ranks(pool: Pool) -> None:
    """The same on three ranks, where no size divides evenly."""
    assert_same_result(pool, 3, "llama", STAGES)


@pytest.mark.parametrize("name", ["llama", "llama tied", "llama LoRA", "t5", "mixtral"])
def test_recompute_changes_no_result(pool: Pool, name: str) -> None:
    """With activations="recompute" the result is plain PyTorch's too, whatever a block takes and returns."""
    assert_same_result(pool, 2, name, RECOMPUTE)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_stages_are_bit_identical_in_bf16(pool: Pool, name: str) -> None:
    """In bf16, clipped, stages 1, 2 and 3 end with the bits of stage 0."""
    runs = [settings | {"precision": "bf16", "max_grad_norm": 0.5} for settings in STAGES]
    assert pool.run(2, differences_to_first, name, runs, timeout=120)[0] == [[], [], []]


def test_experts_of_mixtral_differ_by_rank() -> None:
    """The Mixtral case is the hard one: some expert gets gradients from one rank only."""
    experts_with_gradients = []
    for rank in (0, 1):
        model = mixtral()
        model(**mixtral_batch(0, rank)).loss.backward()
        gradients = model.model.layers[0].mlp.experts.down_proj.grad
        experts_with_gradients.append({expert for expert, grad in enumerate(gradients) if grad.any()})
    assert experts_with_gradients[0] != experts_with_gradients[1]


def dtypes_of_t5_in_fp16(group: dist.ProcessGroup) -> dict[str, torch.dtype]:
    model = t5()
    model, optimizer = onenth.shard(model, adamw(model), group=group, stage=3, precision="fp16")
    optimizer.backward(model(**CASES["t5"].batch(0, group.rank())).loss)
    optimizer.step()
    return {name: parameter.dtype for name, parameter in model.named_parameters()}


def test_modules_that_transformers_keeps_in_fp32_stay_fp32(pool: Pool) -> None:
    """T5 asks for fp32 `wo` weights where the rest is fp16; sharded it trains with exactly those in fp32."""
    for dtypes in pool.run(2, dtypes_of_t5_in_fp16):
        in_fp32 = {name for name, dtype in dtypes.items() if dtype == torch.float32}
        assert in_fp32 == {name for name in dtypes if name.endswith(".wo.weight")}
        assert set(dtypes.values()) == {torch.float32, torch.float16}

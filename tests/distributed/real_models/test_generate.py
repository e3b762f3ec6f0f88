"""`generate` on ranks that stop at different lengths."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

import onenth
from tests.distributed.pool import Pool
from tests.distributed.real_models.cases import CASES, llama, tokens
from tests.distributed.real_models.training import adamw

TIMEOUT = 4.0  # seconds that a transfer may wait


def generate(model: nn.Module, rank: int) -> Tensor:
    """Rank r continues its own prompt by 2 + 3r tokens, greedily."""
    return model.generate(tokens(0, rank)[:1], max_new_tokens=2 + 3 * rank, do_sample=False)


def sharded_llama(group: dist.ProcessGroup, **settings: Any) -> tuple[nn.Module, onenth.ShardedOptimizer]:
    model = llama().train()
    return onenth.shard(model, adamw(model), group=group, stage=3, precision="fp32", **settings)


def generate_inside_gathered(group: dist.ProcessGroup) -> tuple[list[int], list[int], bool]:
    """(this rank's tokens, those of a plain model, whether a training step afterwards was taken)"""
    model, optimizer = sharded_llama(group)
    with onenth.gathered(model):
        generated = generate(model, group.rank())
    optimizer.backward(model(**CASES["llama"].batch(0, group.rank())).loss)
    optimizer.step()
    return generated.tolist(), generate(llama(), group.rank()).tolist(), not optimizer.skipped


def test_generate_inside_gathered(pool: Pool) -> None:
    """Inside `gathered` each rank generates a plain model's tokens on its own; training goes on after it."""
    lengths = set()
    for generated, plain, stepped in pool.run(3, generate_inside_gathered):
        assert generated == plain
        assert stepped
        lengths.add(len(generated[0]))
    assert len(lengths) == 3, "the ranks were meant to stop at different lengths"


def generate_outside_gathered(group: dist.ProcessGroup) -> tuple[list[int] | str, list[int], float]:
    """(this rank's tokens or its error, the tokens of a plain model, seconds)"""
    model, _ = sharded_llama(group, timeout=TIMEOUT)
    outcome: list[int] | str
    start = time.monotonic()
    try:
        outcome = generate(model, group.rank()).tolist()
    except onenth.ShardError as error:
        outcome = str(error)
    return outcome, generate(llama(), group.rank()).tolist(), time.monotonic() - start


def test_generate_outside_gathered_does_not_hang(pool: Pool) -> None:
    """Outside `gathered` a rank gets its tokens, or within a bounded time an error that says how."""
    for outcome, plain, seconds in pool.run(2, generate_outside_gathered, breaks_group=True):
        assert seconds < TIMEOUT + 10
        if isinstance(outcome, str):
            assert "gathered" in outcome
        else:
            assert outcome == plain

"""Same training: sharding changes where bytes lie, never what is learned."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest

from onenth.config import LossScale
from tests.distributed import reference
from tests.distributed.models import TASKS, sgd
from tests.distributed.pool import Pool
from tests.distributed.sharded import ShardedResult, different_bits, train_each

STAGES = (0, 1, 2, 3)
RANKS = (1, 2, 3, 4)
RANKS_AND_SLOW_4 = (1, 2, 3, pytest.param(4, marks=pytest.mark.slow))
PRECISIONS_AND_RANKS = [
    *itertools.product(("bf16", "fp16"), (1, 2, 3)),
    ("bf16", 4),
    pytest.param("fp16", 4, marks=pytest.mark.slow),
]
TOLERANCE = 1e-5  # of the norm over all parameters
SCALE = LossScale(initial=256.0, growth_interval=2)  # no overflow, and growth within a few steps; fp16 alone uses it

Variants = dict[str, dict[str, Any]]


def _by_stage(**arguments: Any) -> Variants:
    return {f"stage {stage}": {"stage": stage, **arguments} for stage in STAGES}


def _assert_same_bits(results: Mapping[str, ShardedResult]) -> None:
    """All variants agree with the first, parameters and norms, to the bit."""
    first, *others = results
    for label in others:
        different = different_bits(results[label].parameters, results[first].parameters)
        assert not different, f"{label} differs from {first} in {different}"
        assert repr(results[label].norms) == repr(results[first].norms), f"{label}: other norms than {first}"


def _assert_ranks_agree(by_rank: list[dict[str, ShardedResult]]) -> None:
    """Every rank computes with the same whole parameters."""
    for label in by_rank[0]:
        assert len({results[label].gathered for results in by_rank}) == 1, f"{label}: ranks differ"


@pytest.mark.parametrize(
    ("task", "ranks"),
    [
        pytest.param(task, ranks, marks=[pytest.mark.slow] if ranks == 4 and task != "tied" else [])
        for task in TASKS
        for ranks in RANKS
    ],
)
def test_equals_plain_pytorch(pool: Pool, task: str, ranks: int) -> None:
    """fp32, AdamW, 5 steps, stages 0-3: parameters, norms and losses are those of one process."""
    expected = reference.train(TASKS[task], ranks)
    by_rank = pool.run(ranks, train_each, task, _by_stage(precision="fp32"))
    _assert_ranks_agree(by_rank)
    for label, result in by_rank[0].items():
        difference = reference.relative_difference(result.parameters, expected.parameters)
        assert difference <= TOLERANCE, f"{label}: {difference:.2e}"
        assert result.norms == pytest.approx(expected.norms, rel=1e-5), label
        losses = [sum(losses) / ranks for losses in zip(*(r[label].losses for r in by_rank), strict=True)]
        assert losses == pytest.approx(expected.losses, rel=1e-5), label


@pytest.mark.parametrize("ranks", RANKS_AND_SLOW_4)
def test_clips_as_plain_pytorch(pool: Pool, ranks: int) -> None:
    """fp32, SGD, clipped in every step: the norm and the scaled update are the whole model's."""
    limit = 0.25
    expected = reference.train(TASKS["tied"], ranks, make_optimizer=sgd, max_grad_norm=limit)
    assert min(expected.norms) > limit
    variants = _by_stage(precision="fp32", make_optimizer=sgd, max_grad_norm=limit)
    for label, result in pool.run(ranks, train_each, "tied", variants)[0].items():
        difference = reference.relative_difference(result.parameters, expected.parameters)
        assert difference <= TOLERANCE, f"{label}: {difference:.2e}"
        assert result.norms == pytest.approx(expected.norms, rel=1e-5), label


@pytest.mark.parametrize(("ranks", "backwards"), [(2, 2), (2, 3), (3, 2), pytest.param(3, 3, marks=pytest.mark.slow)])
def test_backwards_add_up_to_one_large_batch(pool: Pool, ranks: int, backwards: int) -> None:
    """Several backwards before a step, each exchanged as it comes, give the step of one large batch."""
    expected = reference.train(TASKS["odd"], ranks, backwards=backwards, make_optimizer=sgd)
    variants = _by_stage(precision="fp32", make_optimizer=sgd, backwards=backwards)
    for label, result in pool.run(ranks, train_each, "odd", variants)[0].items():
        difference = reference.relative_difference(result.parameters, expected.parameters)
        assert difference <= TOLERANCE, f"{label}: {difference:.2e}"
        assert result.norms == pytest.approx(expected.norms, rel=1e-5), label


@pytest.mark.parametrize(("precision", "ranks"), PRECISIONS_AND_RANKS)
def test_stages_are_bit_identical(pool: Pool, precision: str, ranks: int) -> None:
    """In 16 bits, stages 0-3, activations kept or recomputed, give the same bits at the same N."""
    common = {"precision": precision, "loss_scale": SCALE}
    variants = _by_stage(**common) | {
        f"stage {stage}, recomputed": {"stage": stage, "activations": "recompute", **common} for stage in (1, 3)
    }
    by_rank = pool.run(ranks, train_each, "tied", variants)
    _assert_ranks_agree(by_rank)
    _assert_same_bits(by_rank[0])


@pytest.mark.parametrize(("precision", "ranks"), PRECISIONS_AND_RANKS)
def test_stages_are_bit_identical_when_clipped(pool: Pool, precision: str, ranks: int) -> None:
    """The norm is summed in one order at every stage, so clipping keeps the bits; two backwards a step."""
    common = {"precision": precision, "loss_scale": SCALE, "max_grad_norm": 0.1, "steps": 3, "backwards": 2}
    variants = _by_stage(**common) | {
        f"stage {stage}, recomputed": {"stage": stage, "activations": "recompute", **common} for stage in (0, 2)
    }
    results = pool.run(ranks, train_each, "untied", variants)[0]
    assert min(results["stage 0"].norms) > 0.1
    _assert_same_bits(results)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("task", ["odd", "nested"])
def test_stages_are_bit_identical_on_awkward_models(pool: Pool, task: str, precision: str) -> None:
    """Frozen, unused, zero-sized and scalar parameters, nested units, fp16's skipped steps: the same bits."""
    by_rank = pool.run(3, train_each, task, _by_stage(precision=precision))
    _assert_ranks_agree(by_rank)
    _assert_same_bits(by_rank[0])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bits_follow_fp32(pool: Pool, precision: str) -> None:
    """16-bit training stays close to fp32's, so that bit-identical does not mean identically wrong."""
    expected = reference.train(TASKS["uneven"], 2, make_optimizer=sgd)
    common = {"precision": precision, "loss_scale": SCALE, "make_optimizer": sgd}
    variants: Variants = {"stage 3": {"stage": 3, **common}}
    result = pool.run(2, train_each, "uneven", variants)[0]["stage 3"]
    assert 0 < reference.relative_difference(result.parameters, expected.parameters) < 0.01
    assert result.norms == pytest.approx(expected.norms, rel=0.02)


def _the_last_norm(name: str, module: Any) -> bool:
    return name == "norm"


def _every_linear(name: str, module: Any) -> bool:
    return type(module).__name__ in ("Linear", "Embedding")


def test_units_and_prefetch_do_not_matter(pool: Pool) -> None:
    """Unclipped bf16 training has the same bits with any choice of units, with prefetch on and off."""
    common = {"stage": 3, "precision": "bf16"}
    variants = {
        "auto": common,
        "no prefetch": {"prefetch": False, **common},
        "nearly everything in the root": {"units": _the_last_norm, **common},
        "every linear": {"units": _every_linear, **common},
        "small units": {"max_unit_bytes": 4096, **common},
        "kept gathered": {"keep_gathered": ("layers.0", "layers.2"), **common},
    }
    results = pool.run(3, train_each, "untied", variants)[0]
    reference_parameters = results["auto"].parameters
    for label, result in results.items():
        different = different_bits(result.parameters, reference_parameters)
        assert not different, f"{label} differs in {different}"

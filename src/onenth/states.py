"""What training holds in memory, and which of it each ZeRO stage partitions.

Source of the terms: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv 1910.02054, section 3 (model and residual states) and section 5 (stages).
"""

from __future__ import annotations

from enum import StrEnum


class ModelState(StrEnum):
    """A tensor that training keeps for every parameter from one step to the next.

    Optimizers name their own states; `EXP_AVG` and `EXP_AVG_SQ` are Adam's. Another name (`momentum_buffer`) is
    recorded under that name, so code that lists states reads them from the ledger, not from here.
    """

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    MASTER = "master"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"


class ResidualState(StrEnum):
    """Everything else: what a step needs in passing."""

    ACTIVATIONS = "activations"
    GATHERED = "gathered"  # whole parameters of a unit, between gather and release (stage 3)
    LOCAL_GRADIENTS = "local_gradients"  # a unit's whole gradients of this rank, until they are exchanged (stages 2, 3)
    RECEIVE = "receive"  # slices that other ranks sent, until they are summed
    SUMS = "sums"  # the fp32 scratch of one sum
    STEP = "step_gradient"  # the fp32 gradient of the segment that is being updated
    TEMPORARY = "temporary"  # made and freed within one forward, loss, backward or step
    INPUTS = "inputs"  # what the model's forward is called with
    OUTPUTS = "outputs"  # made by a forward or a loss, needed by no backward, and held by the caller
    BUFFERS = "buffers"  # module buffers
    OTHER = "other"  # held by other code, beyond the part of the step that made it
    UNEXPLAINED = "unexplained"  # nobody saw it being made, and nobody says what it is


class Tier(StrEnum):
    """Where bytes live."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


OPTIMIZER_STATES = "optimizer_states"  # master copy and moments: ZeRO partitions them together

#: stage -> the model states that it partitions over the data-parallel ranks (section 5 of the paper).
STAGES: dict[int, frozenset[str]] = {
    0: frozenset(),
    1: frozenset({OPTIMIZER_STATES}),
    2: frozenset({OPTIMIZER_STATES, ModelState.GRADIENTS}),
    3: frozenset({OPTIMIZER_STATES, ModelState.GRADIENTS, ModelState.PARAMETERS}),
}

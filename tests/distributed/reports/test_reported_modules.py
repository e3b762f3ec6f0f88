"""Kinds of parameters, buffers and modules that broke other sharded trainers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.distributed.reports.harness import WIDTH, Block, Job, Stack, assert_same_training, batch, sgd


class OddParameters(Block):
    """A block with a zero-sized, a scalar, a one-element and two non-contiguous parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, WIDTH))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.full((1,), 0.5))
        self.transposed = nn.Parameter(torch.randn(WIDTH, 3).t() * 0.3)
        self.strided = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH)[:, ::2] * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x) * self.scale + self.shift + self.empty.sum()
        return F.linear(F.linear(x, self.strided), self.transposed) @ self.transposed + x


class Attention(nn.Module):
    """`MultiheadAttention` reads `out_proj.weight` itself and never calls `out_proj`."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.attention(x, x, x)
        return x + y


class Encoder(nn.TransformerEncoderLayer):
    """In eval, PyTorch's own layer hands the weights of its children to one fused operator."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)


class Recurrent(nn.Module):
    """LSTM and GRU keep their weights in a list of their own besides `_parameters`."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.gru = nn.GRU(WIDTH, WIDTH, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(x)
        return x + self.gru(y)[0].unflatten(-1, (2, WIDTH)).sum(-2)


class WeightNorm(Block):
    """Weight norm as a parametrization."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.parametrizations.weight_norm(self.up)


class OldWeightNorm(Block):
    """Weight norm as a forward pre-hook, which reads the parameters before the module's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.weight_norm(self.up)


class BatchNorm(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Buffers(Block):
    """Buffers of every kind, all of them read in forward and one of them written."""

    counts: Tensor
    mask: Tensor
    table: Tensor
    offset: Tensor
    transposed: Tensor
    hidden: Tensor
    shared: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("mask", torch.rand(WIDTH) > 0.3)
        self.register_buffer("table", torch.randn(WIDTH, dtype=torch.float64))
        self.register_buffer("offset", torch.tensor(0.25))
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("transposed", torch.randn(WIDTH, WIDTH).t())
        self.register_buffer("hidden", torch.randn(WIDTH), persistent=False)
        self.register_buffer("shared", self.hidden)
        self.register_buffer("missing", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.counts += 1
        x = super().forward(x) * self.mask + self.table.float() + self.offset
        return x + x @ self.transposed * 0.1 + self.hidden + self.shared


class Product(torch.autograd.Function):
    """x @ weight.T by hand; backward reads the saved weight, and the parameter itself off the context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameter = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ (weight + ctx.parameter) / 2, grad.t() @ x


class CustomFunction(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + Product.apply(F.gelu(Product.apply(x, self.up.weight)), self.down.weight)


class SavedViews(Block):
    """Autograd saves views of the weights: transposed, sliced, chunked, unsqueezed, reshaped."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.up.weight.chunk(2)
        y = x @ first.t() + torch.einsum("bi,oi->bo", x, second)
        y = torch.addmm(self.down.bias, torch.tanh(y), self.down.weight[:, :WIDTH].t())
        square = self.down.weight.view(2, WIDTH, WIDTH)[:1].expand(len(x), -1, -1)
        return x + torch.bmm(y.unsqueeze(1), square)[:, 0]


def odd_parameters() -> nn.Module:
    return Stack(OddParameters)


def weight_norm() -> nn.Module:
    model = Stack(WeightNorm)
    model.head = nn.utils.parametrizations.weight_norm(model.head)
    return model


def old_weight_norm() -> nn.Module:
    model = Stack(OldWeightNorm)
    model.head = nn.utils.weight_norm(model.head)
    return model


def batch_norm() -> nn.Module:
    return Stack(BatchNorm)


def buffers() -> nn.Module:
    return Stack(Buffers)


def custom_function() -> nn.Module:
    return Stack(CustomFunction)


def saved_views() -> nn.Module:
    return Stack(SavedViews)


def attention() -> nn.Module:
    return Stack(Attention)


def encoder() -> nn.Module:
    return Stack(Encoder)


def recurrent() -> nn.Module:
    return Stack(Recurrent, depth=2)


def sequence_loss(model: nn.Module, step: int, rank: int) -> Any:
    yield model(batch(step, rank, 2, 3, WIDTH)).square().mean()


def evaluating_sequence_loss(model: nn.Module, step: int, rank: int) -> Any:
    """An eval forward first: there, attention takes PyTorch's fused path."""
    model.eval()
    with torch.no_grad():
        model(batch(step, rank, 2, 3, WIDTH))
    model.train()
    yield from sequence_loss(model, step, rank)


def is_part_of_attention(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Encoder)


@pytest.mark.parametrize("ranks", [2, 3])
def test_parameters_of_odd_shapes(pool, ranks):
    """Zero-sized, scalar, one-element and non-contiguous parameters, whose padding and strides went wrong."""
    assert_same_training(pool, Job(odd_parameters), ranks=[ranks])


def test_multihead_attention(pool):
    """Attention that uses the weights of a child without calling it."""
    assert_same_training(pool, Job(attention, sequence_loss, sgd))


def test_attention_takes_the_fused_path_in_eval(pool):
    """An eval forward of PyTorch's encoder layer passes whole weights to a fused operator."""
    assert_same_training(pool, Job(encoder, evaluating_sequence_loss, sgd))


def test_a_unit_that_is_never_called(pool):
    """`out_proj` of attention as a unit of its own: its weight is used, but its forward never runs."""
    assert_same_training(pool, Job(encoder, sequence_loss, sgd), units=is_part_of_attention)


def test_recurrent_layers(pool):
    """LSTM and GRU, whose private list of weights went stale elsewhere."""
    assert_same_training(pool, Job(recurrent, sequence_loss))


@pytest.mark.parametrize("build", [weight_norm, old_weight_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_weight_norm(pool, build):
    """Weights computed from two parameters, by a parametrization or by a hook that runs before forward."""
    assert_same_training(pool, Job(build))


def test_batch_norm(pool):
    """Running statistics end as rank 0's, the integer count of batches included."""
    assert_same_training(pool, Job(batch_norm, optimizer=sgd))


def test_buffers_of_every_kind(pool):
    """Integer, boolean, fp64, scalar, empty, non-contiguous, non-persistent, shared and missing buffers."""
    assert_same_training(pool, Job(buffers))


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_custom_autograd_functions(pool, activations):
    """A function that reads the parameter object itself in backward finds it gathered."""
    assert_same_training(pool, Job(custom_function), activations=activations)


def test_views_of_weights_saved_for_backward(pool):
    """Views that autograd saved in forward see the data again in backward, after a release in between."""
    assert_same_training(pool, Job(saved_views))

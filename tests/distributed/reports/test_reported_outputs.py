"""What blocks return, and what happens to it afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
from torch import Tensor, nn

from tests.distributed.reports.harness import WIDTH, Block, Job, Stack, assert_same_training, batch


@dataclass
class Output:
    hidden: Tensor
    extra: Any = None


class Pair(NamedTuple):
    hidden: Tensor
    extra: Any


class Cache:
    """Not a dataclass: tensors in a list and in an attribute, as caches of keys and values keep them."""

    def __init__(self, hidden: Tensor) -> None:
        self.layers = [{"keys": hidden}]
        self.seen = 1


#: name -> (wrap: tensor -> what the block returns, unwrap: the inverse).
CONTAINERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dict": (lambda x: {"hidden": x, "none": None}, lambda out: out["hidden"]),
    "tuple": (lambda x: (None, x, 3, "text"), lambda out: out[1]),
    "named tuple": (lambda x: Pair(x, None), lambda out: out.hidden),
    "nested": (lambda x: {"a": [(x,), None]}, lambda out: out["a"][0][0]),
    "dataclass": (lambda x: Output(x), lambda out: out.hidden),
    "nested dataclass": (lambda x: Output(x.detach(), {"b": Output(x)}), lambda out: out.extra["b"].hidden),
    "cache": (Cache, lambda out: out.layers[0]["keys"]),
}


class Wrapping(Block):
    """A block whose output comes in a container."""

    def __init__(self, container: str) -> None:
        super().__init__()
        self.container = container

    def forward(self, x: Tensor) -> Any:
        return CONTAINERS[self.container][0](super().forward(x))


class Unwrapping(Stack):
    def __init__(self, container: str) -> None:
        super().__init__(partial(Wrapping, container))
        self.container = container

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = CONTAINERS[self.container][1](block(x))
        return x


class AppendsToList(Block):
    """Returns None; its output goes into a list that the caller handed in."""

    def forward(self, x: Tensor, outputs: list[Tensor]) -> None:
        outputs.append(super().forward(x))


class Collecting(Stack):
    def __init__(self) -> None:
        super().__init__(AppendsToList)

    def run_blocks(self, x: Tensor) -> Tensor:
        outputs = [x]
        for block in self.blocks:
            block(outputs[-1], outputs)
        return outputs[-1]


class Watching(Block):
    """Returns None and computes nothing that anybody uses."""

    def forward(self, x: Tensor) -> None:
        self.seen = super().forward(x).detach().norm()


class Watched(Stack):
    def __init__(self) -> None:
        super().__init__(Watching)

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            assert block(x) is None
        return x


class Biased(Block):
    """As in T5: the first block computes a bias, and every block hands it on beside its own output."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(0.1 * batch(7, 7, WIDTH))

    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, None]:
        bias = self.bias * 2 if bias is None else bias
        return super().forward(x + bias), bias, None


class HandingOn(Stack):
    def __init__(self) -> None:
        super().__init__(Biased)

    def run_blocks(self, x: Tensor) -> Tensor:
        bias = None
        for block in self.blocks:
            x, bias, _ = block(x, bias)
        return x + bias


class Returning(Block):
    """Returns its input itself in the middle of the stack."""

    skipped = False

    def forward(self, x: Tensor) -> Tensor:
        return x if self.skipped else super().forward(x)


class Passing(Stack):
    def __init__(self) -> None:
        super().__init__(Returning)
        self.blocks[1].skipped = True


def add_in_place(y: Tensor) -> Tensor:
    return y.add_(1)


def scale_a_slice(y: Tensor) -> Tensor:
    y[:, 1:3] *= 3
    return y


def write_into_a_view(y: Tensor) -> Tensor:
    y.unsqueeze(0)[..., ::2].mul_(2)
    return y


def overwrite_a_row(y: Tensor) -> Tensor:
    y[0] = y[1].detach()
    return y


def in_place_twice(y: Tensor) -> Tensor:
    y.t().mul_(2)
    return y.sub_(0.5).tanh_()


CHANGES = [add_in_place, scale_a_slice, write_into_a_view, overwrite_a_row, in_place_twice]


class ReturnsView(Block):
    """Its output is a view of another tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).t().contiguous().t()


class Changing(Stack):
    """Changes every block's output in place."""

    def __init__(self, block: Callable[[], nn.Module], change: Callable[[Tensor], Tensor]) -> None:
        super().__init__(block)
        self.change = change

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.change(block(x))
        return x


class ChangesInput(Block):
    """Adds to its input in place and returns it."""

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(super().forward(x.clone()))


class TwoInputs(Stack):
    """The first block's input is a fresh tensor each time, so that it may be changed in place."""

    def __init__(self) -> None:
        super().__init__(ChangesInput)

    def run_blocks(self, x: Tensor) -> Tensor:
        return super().run_blocks(x * 1.0)


class ManyOutputs(Block):
    """Three outputs, of which one has no graph, one is an integer and one is unused."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = super().forward(x)
        return y.argmax(-1), y, self.up(x)


class UsesOneOutput(Stack):
    def __init__(self) -> None:
        super().__init__(ManyOutputs)

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            index, x, _ = block(x)
            x = x + index[:, None]
        return x


def dict_loss(model: nn.Module, step: int, rank: int) -> Iterator[Tensor]:
    """The model itself returns a container."""
    yield model(batch(step, rank))["loss"]


class LossInside(Stack):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = super().forward(x)
        return {"logits": logits, "loss": logits.square().mean()}


@pytest.mark.parametrize("container", CONTAINERS)
def test_outputs_in_containers(pool, container):
    """Tensors in dicts, tuples, dataclasses and caches, beside None: backward finds the unit gathered."""
    assert_same_training(pool, Job(partial(Unwrapping, container)))


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_a_block_that_returns_nothing_used(pool, activations):
    """Blocks that return None and reach no loss: no gradients, nothing left gathered."""
    assert_same_training(pool, Job(Watched), activations=activations)


def test_a_block_that_writes_its_output_into_an_argument(pool):
    """Blocks that return None and append to a list of the caller's, as caches that are passed along do."""
    assert_same_training(pool, Job(Collecting))


@pytest.mark.parametrize("build", [HandingOn, Passing])
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_outputs_of_another_block_handed_on(pool, build, activations):
    """A tensor that an earlier block made (T5's bias, or the input itself) is not this block's output."""
    assert_same_training(pool, Job(build), activations=activations)


@pytest.mark.parametrize("change", CHANGES)
def test_outputs_changed_in_place(pool, change):
    """Outputs, and views of them, changed in place after the block: tensor hooks are silently lost."""
    assert_same_training(pool, Job(partial(Changing, Block, change)))


@pytest.mark.parametrize("change", CHANGES)
def test_outputs_that_are_views_changed_in_place(pool, change):
    """The same where the block returns a view, so that the change moves the base's history."""
    assert_same_training(pool, Job(partial(Changing, ReturnsView, change)))


@pytest.mark.parametrize("build", [TwoInputs, UsesOneOutput])
def test_inputs_changed_in_place_and_unused_outputs(pool, build):
    """Blocks that change their input in place, and blocks with outputs of which only some are used."""
    assert_same_training(pool, Job(build))


def test_a_model_that_returns_a_dict(pool):
    """The loss comes out of the root in a dict."""
    assert_same_training(pool, Job(LossInside, dict_loss))

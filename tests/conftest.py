"""Fixtures for every test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.distributed.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four ranks in processes of their own, started once, at the first test that needs them."""
    import torch

    from tests.distributed.pool import Pool

    torch.set_num_threads(1)  # as in the ranks: cores are few, and tensors are tiny
    with Pool() as ranks:
        yield ranks

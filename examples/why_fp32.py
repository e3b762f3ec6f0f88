"""Why Adam's moments and the master copy of the parameters are fp32, in four experiments on a CPU.

    python examples/why_fp32.py

1. A step smaller than half the spacing of 16-bit numbers leaves a weight where it was.
2. The second moment cannot decay in bf16 at beta2 = 0.999: it only ever goes up.
3. A running sum stalls once its next term is half a spacing.
4. A small language model, trained in fp32, in bf16 with fp32 master copy and moments, and in bf16 alone.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import onenth

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LEARNING_RATES = (1e-3, 1e-4, 2e-5, 1e-5, 1e-6)
MOMENT_STEPS = (5_000, 10_000, 20_000)

ALL_BF16 = onenth.Precision(
    parameters=torch.bfloat16,
    gradients=torch.bfloat16,
    sums=torch.float32,
    master=None,
    moments=torch.bfloat16,
)
CONTRACTS: dict[str, str | onenth.Precision] = {
    "fp32": "fp32",
    "bf16, fp32 master and moments": "bf16",
    "all bf16": ALL_BF16,
}


def unmoved_share(dtype: torch.dtype, lr: float, *, elements: int = 1_000_000) -> float:
    """The share of weights from N(0, 0.02), stored in `dtype`, that `w - lr` rounds back to."""
    weights = (torch.randn(elements, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)
    return (weights - lr == weights).float().mean().item()


def second_moment(
    dtype: torch.dtype,
    *,
    fused: bool,
    marks: Sequence[int] = MOMENT_STEPS,
    silent: int = 5_000,
    elements: int = 1024,
) -> list[float]:
    """Mean of AdamW's second moment after each step count in `marks`, its true value being 1.

    Gradients are N(0, 1), then zero for `silent` steps more, after which the last figure is taken. Fused
    AdamW computes an update in fp32 and rounds once; otherwise it rounds after the decay and after the sum.
    """
    parameter = nn.Parameter(torch.zeros(elements, dtype=dtype))
    optimizer = torch.optim.AdamW([parameter], betas=(0.9, 0.999), fused=fused, foreach=False)
    generator = torch.Generator().manual_seed(0)
    last = max(marks)
    means = []
    for step in range(1, last + silent + 1):
        gradient = torch.randn(elements, generator=generator) if step <= last else torch.zeros(elements)
        parameter.grad = gradient.to(dtype)
        optimizer.step()
        if step in marks or step == last + silent:
            means.append(optimizer.state[parameter]["exp_avg_sq"].float().mean().item())
    return means


def running_sum_of_ones(dtype: torch.dtype, terms: int = 4096) -> float:
    """What adding 1 to a total in `dtype` gives after `terms` times."""
    total = torch.zeros((), dtype=dtype)
    for _ in range(terms):
        total += 1
    return total.item()


class Block(nn.Module):
    """A transformer block: causal attention, then an MLP, each behind a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states (batch, sequence, width) after attention and MLP, each added to its input."""
        heads = self.query_key_value(self.attention_norm(hidden)).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (batch, heads, sequence, width / heads)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.output(attended.transpose(1, 2).flatten(2))
        return hidden + self.mlp(hidden)


class ByteModel(nn.Module):
    """A causal language model over bytes: tokens (batch, sequence) int64 -> logits (batch, sequence, 256)."""

    def __init__(self, *, width: int = 96, layers: int = 2, heads: int = 4, sequence: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.positions = nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of each next byte."""
        hidden = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def source_batches(steps: int, *, batch: int = 8, sequence: int = 64) -> Iterator[Tensor]:
    """`steps` times (batch, sequence + 1) bytes of Python's standard library, the same in every call."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(text) - sequence, (batch, 1), generator=generator)
        yield text[starts + torch.arange(sequence + 1)].long()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Tensor]) -> list[float]:
    """The loss of every step, in nats per byte."""
    losses = []
    for tokens in batches:
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_in(precision: str | onenth.Precision, *, steps: int, lr: float = 1e-4) -> list[float]:
    """The losses of `steps` AdamW steps in `precision`; weights and batches are the same in every call."""
    torch.manual_seed(0)
    model = ByteModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model, optimizer = onenth.shard(model, optimizer, stage=0, precision=precision)
    return train(model, optimizer, source_batches(steps))


def short(dtype: torch.dtype) -> str:
    """The usual short name of a dtype."""
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


def numbers_table(*columns: str) -> Table:
    """An empty table whose first column names the row and whose others hold numbers."""
    table = Table(box=SIMPLE_HEAD)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    return table


def section(title: str, table: Table, reason: str) -> Group:
    """One experiment as printed: what was done, the figures, and why they are so."""
    return Group(f"[bold]{title}[/bold]", table, f"{reason}\n")


def unmoved_section() -> Group:
    """Experiment 1: one row per learning rate."""
    table = numbers_table("lr", *map(short, DTYPES))
    for lr in LEARNING_RATES:
        table.add_row(f"{lr:g}", *(f"{unmoved_share(dtype, lr):.1%}" for dtype in DTYPES))
    return section(
        "1. Weights from N(0, 0.02) that a step of size lr leaves where they were",
        table,
        "Half the spacing of bf16 numbers around 0.02 is 6e-5: w minus less is w.",
    )


def second_moment_section() -> Group:
    """Experiment 2: one row per dtype and number of roundings."""
    table = numbers_table("after steps", *(f"{mark:,}" for mark in MOMENT_STEPS), "then 5,000 of g = 0")
    runs = {
        "fp32": (torch.float32, True),
        "bf16, 1 rounding": (torch.bfloat16, True),
        "bf16, 2 roundings": (torch.bfloat16, False),
    }
    for label, (dtype, fused) in runs.items():
        table.add_row(label, *(f"{mean:.3f}" for mean in second_moment(dtype, fused=fused)))
    return section(
        "2. Mean of AdamW's second moment, beta2 = 0.999, gradients g from N(0, 1)",
        table,
        "It should be 1. Decay by a thousandth is under half a spacing: it only goes up.",
    )


def running_sum_section() -> Group:
    """Experiment 3: one row per dtype."""
    table = numbers_table("total in", "gives")
    for dtype in DTYPES:
        table.add_row(short(dtype), f"{running_sum_of_ones(dtype):,.0f}")
    return section(
        "3. One added 4,096 times",
        table,
        "From 256 on, bf16 numbers are 2 apart: 257 rounds to 256. In fp16, from 2,048.",
    )


def training_section(steps: int) -> Group:
    """Experiment 4: mean losses over up to five equal windows of the run, one column per dtype contract."""
    table = numbers_table("steps", *CONTRACTS)
    losses = torch.tensor([train_in(precision, steps=steps) for precision in CONTRACTS.values()])
    for window in torch.arange(steps).tensor_split(min(5, steps)):
        means = losses[:, window].mean(1).tolist()
        table.add_row(f"{window[0] + 1} to {window[-1] + 1}", *(f"{mean:.3f}" for mean in means))
    return section(
        f"4. Loss of a byte-level language model in {steps} AdamW steps at lr 1e-4",
        table,
        "Same weights, same batches; both bf16 runs compute in bf16.",
    )


def main(steps: int = 300) -> None:
    """Show why Adam's moments and the master copy are fp32.

    Args:
        steps: training steps of the language model.
    """
    if steps < 1:
        raise SystemExit(f"--steps {steps}: at least 1 is meant")
    torch.set_num_threads(1)
    console = Console(highlight=False)
    for experiment in (unmoved_section, second_moment_section, running_sum_section):
        console.print(experiment())
    console.print(training_section(steps))


if __name__ == "__main__":
    tyro.cli(main)

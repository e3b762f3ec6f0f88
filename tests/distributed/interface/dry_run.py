"""Two training steps of a tiny decoder on fake tensors, as rank 0 of 1024; prints what was held, as JSON."""

from __future__ import annotations

import json
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import onenth

RANKS = 1024
VOCABULARY, WIDTH, LAYERS, SEQUENCE = 512, 64, 4, 32


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.ffn_norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(hidden)).chunk(3, dim=-1)
        hidden = hidden + self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True))
        return hidden + self.down(F.silu(self.up(self.ffn_norm(hidden))))


class Decoder(nn.Module):
    """int64 [batch, SEQUENCE] -> scalar loss"""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(self.norm(hidden)).float()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def main() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    start = time.monotonic()
    reports = {}
    for stage in (1, 3):
        with FakeTensorMode():
            with torch.device("meta"):
                model = Decoder()
            model, optimizer = onenth.shard(
                model, torch.optim.AdamW(model.parameters()), stage=stage, precision="bf16", device="cpu"
            )
            ids = torch.zeros(2, SEQUENCE, dtype=torch.int64)
            for _ in range(2):
                optimizer.backward(model(ids))
                optimizer.step()
                optimizer.zero_grad()
            report = onenth.memory_report(model, optimizer)
        reports[stage] = {
            "held": {state: size for (state, _), size in report.held.items()},
            "expected": {state: size for (state, _), size in report.expected.items()},
        }
    print(json.dumps({"seconds": time.monotonic() - start, "reports": reports}))


if __name__ == "__main__":
    main()

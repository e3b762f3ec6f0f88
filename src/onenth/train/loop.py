"""The training loop: steps, evaluations, metrics and saves, from the step where a run stands to its last."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from onenth.api import memory_report
from onenth.breakdown import Breakdown
from onenth.train.batches import Batches
from onenth.train.display import Display
from onenth.train.evaluation import Evaluation, causal_loss
from onenth.train.memory import peak_bytes
from onenth.train.metrics import Record, Sink
from onenth.train.options import Options
from onenth.train.ranks import gather_numbers
from onenth.train.schedule import learning_rate


@dataclass(frozen=True)
class Step:
    """What one step was.

    loss: mean over all ranks, in nats a token.
    report: this rank's model states at the end of it, gradients not cleared yet.
    held, peak: bytes by rank: model states, and the most memory used so far.
    """

    loss: float
    lr: float
    seconds: float
    report: Breakdown
    held: list[int]
    peak: list[int]


@dataclass(frozen=True)
class Loop:
    """Everything a run needs to go from one step to the next.

    sinks: where metrics go; none on other ranks than 0.
    around: what surrounds a step, by its index.
    save: called with the number of steps done when a save is due.
    """

    options: Options
    model: nn.Module
    optimizer: Any
    device: torch.device
    batches: Batches
    evaluation: Evaluation
    display: Display
    sinks: list[Sink]
    save: Callable[[int], None]
    around: Callable[[int], AbstractContextManager[None]]

    def run(self, start: int) -> tuple[Breakdown, float]:
        """Train from step `start` to the last; returns the last step's model states and the held-out loss."""
        held_out, options = math.nan, self.options
        with self.display.progress(start, options.steps):
            for index in range(start, options.steps):
                step, done = self.step(index), index + 1
                self._tell_step(step, done)
                if done % options.eval_interval == 0 or done == options.steps:
                    held_out = self.evaluation.loss(self.model, self.device)
                    self._tell_evaluation(step, done, held_out)
                if done == options.steps or (options.save_interval and done % options.save_interval == 0):
                    self.save(done)
        return step.report, held_out

    def step(self, index: int) -> Step:
        """One step: its micro-batches forward and backward, and the update."""
        began, options = time.perf_counter(), self.options
        lr = learning_rate(index, steps=options.steps, peak=options.lr, warmup=options.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with self.around(index):
            total, report = self._update(index)
        numbers = [float(total), float(report.total), float(peak_bytes(self.device))]
        losses, held, peak = zip(*gather_numbers(numbers, self.device), strict=True)
        return Step(
            loss=sum(losses) / len(losses),
            lr=lr,
            seconds=time.perf_counter() - began,
            report=report,
            held=[int(count) for count in held],
            peak=[int(count) for count in peak],
        )

    def _update(self, index: int) -> tuple[torch.Tensor, Breakdown]:
        """Forward, backward and update; returns the mean loss of this rank, and its model states at the end."""
        total = torch.zeros((), device=self.device)
        for tokens in self.batches.of(index):
            loss = causal_loss(self.model, tokens.to(self.device)) / self.batches.accumulation
            self.optimizer.backward(loss)
            total += loss.detach()
        self.optimizer.step()
        report = memory_report(self.model, self.optimizer)
        self.optimizer.zero_grad()
        return total, report

    def _tell_step(self, step: Step, done: int) -> None:
        speed = self.options.batch * self.options.sequence / step.seconds
        self.display.step(done=done, loss=step.loss, tokens_per_second=speed, held=max(step.held))
        self._write(
            {
                "step": done,
                "loss": step.loss,
                "lr": step.lr,
                "grad_norm": _number(self.optimizer.grad_norm),
                "loss_scale": _number(self.optimizer.loss_scale),
                "skipped_steps": self.optimizer.skipped_steps,
                "seconds": step.seconds,
                "tokens_per_second": speed,
                "model_state_bytes": step.held,
                "peak_bytes": step.peak,
            }
        )

    def _tell_evaluation(self, step: Step, done: int, held_out: float) -> None:
        self.display.evaluation(done=done, loss=step.loss, held_out=held_out, lr=step.lr)
        self._write({"step": done, "held_out_loss": held_out})

    def _write(self, record: Record) -> None:
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in record.items()
        }
        for sink in self.sinks:
            sink.write(finite)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)

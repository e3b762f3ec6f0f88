"""A run of `onenth train` as each rank does it, from joining the others to the model's sample."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import nn

from onenth.api import shard
from onenth.config import Config
from onenth.train import save
from onenth.train.batches import Batches
from onenth.train.display import Display
from onenth.train.evaluation import Evaluation, unigram_loss
from onenth.train.loop import Loop
from onenth.train.material import Material, prepare
from onenth.train.memory import unsharded_bytes
from onenth.train.metrics import Sink, sinks
from onenth.train.model import adamw, build
from onenth.train.options import Options
from onenth.train.recording import WARM_UP, Recording
from onenth.train.resume import check_same, plain
from onenth.train.sample import export, generate
from onenth.world import init

Around = Callable[[int], AbstractContextManager[None]]
_PROMPT = 24  # tokens of held-out text that the sample goes on from


def train(options: Options) -> None:
    """Train, on this rank and all others at once. Raises ConfigError for what cannot be trained as asked."""
    Job(options).run()


class Job:
    """One run on one rank."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.world = init()
        options.check_batch(self.world.size)
        self.config = Config(
            stage=options.stage,
            precision=options.precision,
            activations=options.activations,
            max_grad_norm=options.max_grad_norm,
        )
        self.display = Display(self.world)

    def run(self) -> None:
        """All of it."""
        _quiet_transformers()
        options, world, display = self.options, self.world, self.display
        display.contract(options, self.config.dtypes, world)
        material = prepare(options, rank=world.rank)
        model = build(material.model_config, options.model, seed=options.seed, rank=world.rank)
        display.material(model, material)
        unsharded = unsharded_bytes(model, self.config.dtypes)
        model, optimizer = shard(model, adamw(model, lr=options.lr, weight_decay=options.weight_decay), self.config)
        start = self._resume(material, model, optimizer)
        with ExitStack() as stack:
            around = self._around(model, optimizer, start)
            loop = self._loop(material, model, optimizer, self._sinks(material, start, stack), around)
            report, held_out = loop.run(start)
        display.outcome(held_out, unigram_loss(material.text, material.vocabulary.size))
        display.states(report, unsharded, world, options.stage)
        self._show_sample(material, model)
        export(model, material.output / "model", dtype=self.config.dtypes.parameters, rank=world.rank)
        display.written(material.output)

    def _resume(self, material: Material, model: nn.Module, optimizer: Any) -> int:
        """Put a save's state in place, if there is one to go on from; returns the steps done."""
        torch.manual_seed(self.options.seed + self.world.rank)  # dropout differs by rank
        if self.options.resume is None:
            return 0
        run = save.describe(self.options.resume)
        check_same(run, ranks=self.world.size, model=material.model_values, text=material.text.digest)
        state = save.load(self.options.resume, rank=self.world.rank)
        save.set_rank_state(state, model, optimizer, self.world.device)
        return run.step

    def _sinks(self, material: Material, start: int, stack: ExitStack) -> list[Sink]:
        """Rank 0's metrics, closed when `stack` is."""
        if self.world.rank != 0:
            return []
        opened = sinks(material.output, after=start if self.options.resume is not None else None)
        for sink in opened:
            stack.callback(sink.close)
        return opened

    def _around(self, model: nn.Module, optimizer: Any, start: int) -> Around:
        """What surrounds each step: a recording of one of them, if it is asked for."""
        options = self.options
        if options.anatomy is None:
            return lambda index: nullcontext()
        at = min(start + WARM_UP, options.steps - 1)
        return Recording(options.anatomy, at, model, optimizer, self.world, self.display).around

    def _loop(self, material: Material, model: nn.Module, optimizer: Any, opened: list[Sink], around: Around) -> Loop:
        options, world, text = self.options, self.world, material.text
        micro_batch = options.rank_batch(world.size)

        def save_at(done: int) -> None:
            run = save.Run(done, world.size, plain(options), material.model_values, text.digest)
            state = save.rank_state(model, optimizer, world.device)
            save.save(material.output, run, state, rank=world.rank)

        return Loop(
            options=options,
            model=model,
            optimizer=optimizer,
            device=world.device,
            batches=Batches(
                tokens=text.training,
                sequence=options.sequence,
                seed=options.seed,
                ranks=world.size,
                rank=world.rank,
                micro_batch=micro_batch,
                accumulation=options.accumulation(world.size),
            ),
            evaluation=Evaluation(text.held_out, options.sequence, world.size, world.rank, micro_batch),
            display=self.display,
            sinks=opened,
            save=save_at,
            around=around,
        )

    def _show_sample(self, material: Material, model: nn.Module) -> None:
        options, words = self.options, material.vocabulary
        if not options.sample:
            return
        given = words.encode(options.prompt.encode()) if options.prompt else material.text.held_out[:_PROMPT]
        prompt = given.long().to(self.world.device)
        new = generate(model, prompt, tokens=options.sample, end=words.end, seed=options.seed)
        self.display.sample(words.decode(given), words.decode(new))


def _quiet_transformers() -> None:
    """Its hints are for people who write the code that calls it; its errors are raised all the same."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]

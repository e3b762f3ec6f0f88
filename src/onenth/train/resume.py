"""Going on from a save: its options with those given again on top, as long as they leave the run the same."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from onenth.errors import ConfigError
from onenth.train.options import Options, flag
from onenth.train.save import Run, describe, find

#: Options that a resumed run may change: they touch no bit of a step, but `steps`, which moves the schedule.
FREE = frozenset({"resume", "output", "steps", "eval_interval", "save_interval", "sample", "prompt"})

#: Options that are no part of a run, and that one that goes on from it does not take over.
OF_THIS_RUN = frozenset({"resume", "anatomy"})


def plain(options: Options) -> dict[str, Any]:
    """Options as JSON holds them; paths absolute, since a resumed run may start elsewhere."""
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    return {name: _plain(value) for name, value in values.items() if name not in OF_THIS_RUN}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    return str(value.resolve()) if isinstance(value, Path) else value


def _options(values: dict[str, Any]) -> Options:
    paths = {name: Path(values[name]) for name in ("model", "tokenizer", "output") if values[name] is not None}
    return Options(**values | paths | {"text": tuple(map(Path, values["text"]))})


def resumed(options: Options, given: set[str]) -> Options:
    """The options of the run to go on with. Raises ConfigError if one given again would change it."""
    if options.resume is None:
        return options
    save = find(options.resume)
    run = describe(save)
    saved = replace(_options(run.options), ranks=run.ranks, output=save.parent)
    changes = {name: getattr(options, name) for name in given}
    before, after = plain(saved), plain(replace(saved, **changes))
    wrong = [
        f"{flag(name)} was {before[name]} and is {after[name]}"
        for name in before
        if name not in FREE and before[name] != after[name]
    ]
    if wrong:
        raise ConfigError(f"--resume {options.resume}: {'; '.join(wrong)}. A resumed run keeps its settings")
    whole = replace(saved, **changes | {"resume": save})
    if run.step >= whole.steps:
        raise ConfigError(
            f"--resume {save}: the run is at step {run.step} of {whole.steps}; give more --steps to go on"
        )
    return whole


def check_same(run: Run, *, ranks: int, model: dict[str, Any], text: str) -> None:
    """Raise ConfigError if what the run was made of is not what it is made of now."""
    wrong = []
    if run.ranks != ranks:
        wrong.append(f"was saved on {run.ranks} ranks, and these are {ranks}: start as many")
    changed = sorted(name for name in {*run.model, *model} if run.model.get(name) != model.get(name))
    if changed:
        wrong.append(f"the model's configuration changed: {', '.join(changed)}")
    if run.text != text:
        wrong.append("the text changed since")
    if wrong:
        raise ConfigError(f"--resume: {'; '.join(wrong)}")

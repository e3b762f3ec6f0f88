"""The errors that users see: one tree, each also a built-in error; messages name the offenders and the way out."""

from __future__ import annotations


class OnenthError(Exception):
    """Root of every error that onenth raises on purpose."""


class ConfigError(OnenthError, ValueError):
    """A setting is unknown, of the wrong type, or out of range; the message lists every offender."""


class ShardError(OnenthError, RuntimeError):
    """A model, an optimizer or a training step cannot work sharded as it was called."""


class TransferError(ShardError):
    """Ranks did not meet in a transfer: one is missing, dead, or in another call."""


class CheckpointError(OnenthError, RuntimeError):
    """A checkpoint cannot be written, or what was read is not what was saved."""


class PlanError(OnenthError, ValueError):
    """A plan cannot be made from what was given."""


class AnatomyError(OnenthError, ValueError):
    """A recording or a memory snapshot cannot be read, or a step cannot be recorded."""

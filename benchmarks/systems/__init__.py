"""The systems by name, in the order of the table."""

from __future__ import annotations

from benchmarks.systems import compute, ddp, deepspeed, fsdp2, onenth
from benchmarks.systems.base import System

SYSTEMS: dict[str, System] = {
    system.name: system for module in (compute, ddp, fsdp2, deepspeed, onenth) for system in module.SYSTEMS
}

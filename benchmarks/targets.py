"""The ratios that onenth is held to, and the peer of each stage."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.results import Results


@dataclass(frozen=True, kw_only=True)
class Target:
    """`system` may take at most `limit` times what `peer` takes, in `what` ("time" or "bytes"), on `job`."""

    job: str
    what: str
    system: str
    peer: str
    limit: float

    def ratio(self, results: Results) -> float | None:
        """The measured ratio; None where one of the two wasn't measured."""
        systems = results.get(self.job, {})
        if self.system not in systems or self.peer not in systems:
            return None
        mine, theirs = systems[self.system], systems[self.peer]
        return mine.time_ratio(theirs) if self.what == "time" else mine.bytes_ratio(theirs)


def _time(job: str, system: str, peer: str, limit: float) -> Target:
    return Target(job=job, what="time", system=system, peer=peer, limit=limit)


def _bytes(system: str, peer: str, limit: float = 1.0) -> Target:
    return Target(job="C", what="bytes", system=system, peer=peer, limit=limit)


TARGETS = (
    _time("A", "onenth3", "fsdp2", 0.80),
    _time("B", "onenth3", "fsdp2", 0.75),
    _time("A", "onenth3", "compute", 1.20),
    *(_time("A", stage, "zro", 0.84) for stage in ("onenth1", "onenth2")),
    *(_time("B", stage, "zro", 0.78) for stage in ("onenth1", "onenth2")),
    *(_time("B", f"onenth{stage}", f"deepspeed{stage}", 0.70) for stage in (1, 2)),
    _bytes("onenth3", "fsdp2", 0.95),
    _bytes("onenth0", "ddp"),
    _bytes("onenth1", "zro"),
    *(_bytes(f"onenth{stage}", f"deepspeed{stage}") for stage in (1, 2, 3)),
)

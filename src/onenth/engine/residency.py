"""Residency: which units are whole, and the gathers under way. At most one gather runs ahead of its use."""

from __future__ import annotations

from onenth.comm import Transfer
from onenth.engine.machine import Activity, UnitState
from onenth.engine.schedule import GatherOrder


class Residency:
    """Gathers units before use and releases them after it; at stages 0 to 2 there is nothing to move.

    partitioned: whether the stage partitions parameters.
    ahead: the unit whose gather runs ahead of its use, if any.
    """

    def __init__(self, activities: list[Activity], *, partitioned: bool, prefetch: bool) -> None:
        self.activities, self.partitioned, self.prefetch = activities, partitioned, prefetch
        self.order = GatherOrder()
        self.ahead: Activity | None = None
        self._transfers: dict[Activity, list[Transfer]] = {}

    def need(self, activity: Activity) -> None:
        """Make the unit whole, and start gathering the one that comes next."""
        if activity.is_whole:
            return
        self.fetch(activity)
        following = self.order.visit(activity.unit.index)
        if following is not None and self.prefetch and self.partitioned:
            candidate = self.activities[following]
            if candidate.state in (UnitState.SHARDED, UnitState.EXCHANGING):
                self._start(candidate)
                self.ahead = candidate

    def fetch(self, activity: Activity) -> None:
        """Make the unit whole, whatever comes next."""
        if activity.is_whole:
            return
        if self.ahead is not None and self.ahead is not activity:
            self.cancel()
        if activity.state is not UnitState.GATHERING:
            self._start(activity)
        self._complete(activity)

    def _start(self, activity: Activity) -> None:
        self._transfers[activity] = activity.unit.gather() if self.partitioned else []
        activity.move(UnitState.GATHERING)

    def _complete(self, activity: Activity) -> None:
        if self.ahead is activity:
            self.ahead = None
        for transfer in self._transfers.pop(activity):
            transfer.wait()
        if self.partitioned:
            activity.unit.expose()
        activity.move(UnitState.GATHERED)

    def cancel(self) -> None:
        """Drop the gather that runs ahead; its messages are waited for, since they write into the buffer."""
        activity, self.ahead = self.ahead, None
        if activity is None:
            return
        for transfer in self._transfers.pop(activity):
            transfer.wait()
        activity.unit.discard()
        activity.move(self._rest(activity))

    def release(self, activity: Activity) -> None:
        """Nobody computes with the unit any more: give its bytes back, unless it is to stay."""
        if activity.stays:
            if activity.state is not UnitState.GATHERED:
                activity.move(UnitState.GATHERED)
            return
        if self.partitioned:
            activity.unit.release()
        activity.move(self._rest(activity))

    def _rest(self, activity: Activity) -> UnitState:
        return UnitState.EXCHANGING if activity.unit.has_unexchanged else UnitState.SHARDED

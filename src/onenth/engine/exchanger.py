"""The exchange of gradients: one unit at a time, in one order on all ranks."""

from __future__ import annotations

from onenth.comm import Transfer
from onenth.engine.machine import Activity, UnitState
from onenth.engine.schedule import ExchangeOrder
from onenth.model_states.gradients import Free


class Exchanger:
    """Exchanges units' gradients as they finish, in the order of the unit list, last first.

    enabled: False inside `no_sync`.
    free: scratch of the exchanges, given back when everything is finished.
    in_flight: the unit whose exchange is under way. It is waited for and summed just before the next one starts, so
        that at most one receive buffer exists.
    """

    def __init__(self, activities: list[Activity], free: Free) -> None:
        self.activities, self.free = activities, free
        self.order = ExchangeOrder([a.unit.index for a in reversed(activities) if a.unit.trainable])
        self.enabled = True
        self.in_flight: Activity | None = None
        self._transfers: list[Transfer] = []

    def done(self, activity: Activity) -> None:
        """The unit's gradients of this backward are complete."""
        self.order.done.add(activity.unit.index)

    def advance(self, *, force: bool = False) -> None:
        """Exchange the units whose turn it is: those done, and those that no forward used; `force`: all the rest."""
        if force:
            self.free.clear()  # no unit is still to fill its gradients
        while self.enabled and (index := self.order.next()) is not None:
            activity = self.activities[index]
            if not force and activity.ran and index not in self.order.done:
                return
            self.order.advance()
            self.exchange(activity)

    def exchange(self, activity: Activity) -> None:
        """Start the exchange of one unit."""
        self.finish()
        self._transfers = activity.unit.exchange()
        self.in_flight = activity

    def finish(self) -> None:
        """Wait for the exchange under way and sum it."""
        activity, self.in_flight = self.in_flight, None
        if activity is None:
            return
        for transfer in self._transfers:
            transfer.wait()
        self._transfers = []
        activity.unit.reduce()
        if activity.state is UnitState.EXCHANGING:
            activity.move(UnitState.SHARDED)

    def settle(self) -> None:
        """Finish everything under way."""
        self.finish()
        for activity in self.activities:
            for flat in activity.unit.trainable:
                assert flat.gradients is not None
                flat.gradients.settle()
        self.free.clear()

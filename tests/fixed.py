"""An admission for tests of the schedule, which knows nothing of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pybuild.events import Reading


@dataclass(frozen=True)
class Fixed:
    """So many at once, whatever they need."""

    jobs: int

    def admit(self, now: float, running: Mapping[str, Reading], waiting: Sequence[str]) -> list[str]:
        """The first ones that are left, up to the number."""
        return list(waiting[: max(0, self.jobs - len(running))])

    def evict(self, now: float, running: Mapping[str, Reading]) -> list[str]:
        """None: nothing is known of memory."""
        return []

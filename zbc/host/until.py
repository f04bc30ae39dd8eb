"""How long a command goes on: what it plans for remarks has the time that its plan has left of the budget."""

from __future__ import annotations

import time

USUAL = 15.0  # CPU seconds of a command where nothing is said
LEAST = 3.0  # whatever the budget: remarks of small jobs take less


class Until:
    """An end in CPU seconds of this process, from when it is made; `cut`: whether something was left out for it."""

    def __init__(self, budget: float | None = None) -> None:
        self._end = time.process_time() + max(LEAST, USUAL if budget is None else budget)
        self.cut = False

    def over(self, needs: float = 0.0) -> bool:
        """Whether what takes some `needs` seconds would end too late."""
        late = time.process_time() + needs > self._end
        self.cut = self.cut or late
        return late

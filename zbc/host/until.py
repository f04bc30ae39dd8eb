"""The time limit of a command: plans for remarks get the time that its plan has left of the budget."""

from __future__ import annotations

import time

USUAL = 15.0  # CPU seconds of a command without a budget
LEAST = 3.0  # CPU seconds for remarks with any budget; small jobs take less


class Until:
    """A limit in CPU seconds of this process, from its construction on; `cut`: whether work was skipped for it."""

    def __init__(self, budget: float | None = None) -> None:
        self._end = time.process_time() + max(LEAST, USUAL if budget is None else budget)
        self.cut = False

    def over(self, needs: float = 0.0) -> bool:
        """Whether work of `needs` seconds would end after the limit."""
        late = time.process_time() + needs > self._end
        self.cut = self.cut or late
        return late

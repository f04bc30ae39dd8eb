"""Reports why a plan cannot be written in another tool's format: all reasons at once."""

from __future__ import annotations

from zbc.errors import ZbcError


class Refused:
    """Collects the features that `tool` cannot express; `raise_any` raises E413 if there are any."""

    def __init__(self, target: str, tool: str) -> None:
        self.target, self.tool = target, tool
        self.reasons: list[str] = []

    def add(self, reason: str) -> None:
        self.reasons.append(reason)

    def raise_any(self, hint: str = "`--format json` keeps everything") -> None:
        if self.reasons:
            text = f"export: {self.tool} cannot express this plan ({self.target})"
            raise ZbcError("E413", text, details=self.reasons, hint=hint)

"""Reports why a plan cannot be written in another tool's format: all reasons at once."""

from __future__ import annotations

from collections.abc import Mapping

from zbc.errors import ZbcError

KEEPS = "`--format json` keeps everything"


def refuse(target: str, tool: str, reasons: Mapping[str, object], hint: str = KEEPS) -> None:
    """Raises E413 with the reasons that hold: what `tool` cannot express."""
    if held := [reason for reason, holds in reasons.items() if holds]:
        raise ZbcError("E413", f"export: {tool} cannot express this plan ({target})", details=held, hint=hint)

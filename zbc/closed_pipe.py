"""A reader of stdout that goes away: `zbc schedules | head -1`."""

from __future__ import annotations

import os
import sys

EXIT_PIPE = 141  # what a shell reports of a program that a closed pipe ended


def silence_stdout() -> None:
    """What is still to be written goes nowhere; else Python complains when it flushes in the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

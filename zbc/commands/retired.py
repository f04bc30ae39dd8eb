"""Commands and options that are gone: one line says what to type now."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

# Words once typed -> the words to type now; {} stands for what followed them.
COMMANDS = {
    ("simulate",): "report {}",
    ("bubbles",): "report {}",
    ("diff",): "compare {}",
    ("import",): "plan JOB.toml --schedule {}",
    ("schedules",): "explain schedules {}",
    ("config", "show"): "explain {}",
    ("config", "schema"): "explain keys --json",
    ("config",): "explain JOB.toml",
    ("doctor", "--model"): "check --gradients {}",
    ("doctor",): "explain machine {}",
    ("data", "tokenize"): "tokenize {}",
    ("data",): "tokenize TEXT -o OUT.bin",
}
# Option -> the commands that had it, and what to type now.
OPTIONS = {
    "--csv": (("compare",), "--format csv"),
    "--md": (("compare",), "--format md"),
    "--tex": (("compare",), "--format tex"),
    "--svg": (("compare",), "-o FILE.svg"),
    "--suggest": (("check",), "--fix"),
    "--caption": (("visualize",), "-o FILE alone: plans are called as they are named"),
    "--own-axis": (("visualize",), "zbc visualize, once for each plan"),
    "--barrier": (("visualize",), "--steps N --set optimizer.sync=before-step"),
    "--no-barrier": (("visualize",), "--steps N --set optimizer.sync=post-validate"),
    "--gpus": (("init",), "zbc advise FOLDER --gpus N --gpu NAME -o zbc.toml"),
    "--gpu": (("init",), "zbc advise FOLDER --gpus N --gpu NAME -o zbc.toml"),
    "--nodes-of": (("advise",), "--set hardware.ranks_per_node=N"),
    "--plan": (("report",), "zbc report PLAN, for what is predicted; logs of other tools are not read"),
    "--trials": (("report",), "--jitter alone: a spread is always of 200 steps"),
    "--seed": (("report",), "--jitter alone: it draws the same times each time"),
    "--width": (("visualize",), "COLUMNS=N before the command"),
    "--from": (("visualize",), "--steps A-B"),
    "--out": (("tune",), "-o DIR alone: what it tried is below runs"),
    "--base": (("profile",), "--profile FILE"),
    "--phase": (("profile", "report"), "RUN/trace/NAME in place of RUN"),
    "--together": (("profile",), "--threads N: as many ranks compute at once as fit on the cores"),
    "--all": (("compare",), "zbc visualize A B, which shows transfers too"),
}
# Old spelling of an option -> the commands that have it, and the option of today; "" for an argument.
READ = {
    "--as": (("visualize",), "--format"),
    "--to": (("export",), "--format"),
    "--schedules": (("compare",), "--schedule"),
    "--out": (("run",), "--output"),
    "--from-trace": (("profile",), ""),
}


def read(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command line with the options of today, and a line for each old spelling."""
    found, lines = list[str](), list[str]()
    for argument in arguments:
        old, equals, value = argument.partition("=")
        commands, new = READ.get(old, ((), ""))
        if arguments[0] not in commands:
            found.append(argument)
            continue
        found += [new + equals + value] if new else [value] * bool(equals)
        lines.append(f"`{old}` of `zbc {arguments[0]}` is an old spelling; type: {new or 'its argument alone'}")
    return found, lines


def now(arguments: Sequence[str]) -> str | None:
    """The line for a command line with a command or an option that is gone; None for one without."""
    for words, instead in COMMANDS.items():
        if tuple(arguments[: len(words)]) == words:
            rest = shlex.join(arguments[len(words) :])
            return f"`zbc {' '.join(words)}` is gone; type: zbc {instead.format(rest).rstrip()}"
    for argument in arguments[1:]:
        commands, instead = OPTIONS.get(argument.partition("=")[0], ((), ""))
        if arguments[0] in commands:
            return f"`{argument}` of `zbc {arguments[0]}` is gone; type: {instead}"
    return None

"""The command line: the list of commands, and their exit codes.

Modules of commands import inside their commands, so that `zbc --help` stays fast. Everything that commands call raises
`ZbcError` or returns.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from zbc import __version__
from zbc.commands import (
    advice,
    checking,
    comparing,
    drawing,
    exchanging,
    explaining,
    jobs,
    planning,
    profiling,
    reporting,
    retired,
    running,
    tokenizing,
    tuning,
)
from zbc.commands.console import show_error, tell
from zbc.commands.options import spread
from zbc.errors import EXIT_BUG, EXIT_INTERRUPTED, ZbcError
from zbc.host.closed_pipe import EXIT_PIPE, open_missing, silence, to_stdout, unwritten_stdout

# How `zbc --help` groups the commands.
GROUPS = {
    "Plan": ("init", "advise", "plan", "compare", "profile"),
    "Look": ("report", "visualize", "check", "explain"),
    "Train": ("run", "tune", "tokenize"),
    "Exchange": ("export",),
}


class _Grouped(TyperGroup):
    """The commands under the heads of `GROUPS`; values of options are refused in the words of the job file's keys."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            if problems := getattr(error.__cause__, "errors", None):  # of pydantic, in newer versions of typer
                from zbc.job.wording import sentence

                problem = problems()[0]
                told = problem["type"] == "value_error"  # by its own words
                error.message = sentence(problem) + ("" if told else f", found {problem['input']}")
            raise

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, self.commands))
        for head, names in GROUPS.items():
            with formatter.section(head):
                rows = [(f"{name:<{width}}", self.commands[name].get_short_help_str(64)) for name in names]
                formatter.write_dl(rows)


app = typer.Typer(
    name="zbc",
    cls=_Grouped,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
)


def _version(asked: bool) -> None:
    if asked:
        to_stdout(f"zbc {__version__}")
        raise typer.Exit()


@app.callback()
def zbc(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Compile pipeline-parallel training schedules into proven plans per rank."""


for _name, _command in (
    ("init", jobs.init),
    ("advise", advice.advise),
    ("plan", planning.plan),
    ("compare", comparing.compare),
    ("profile", profiling.profile),
    ("visualize", drawing.visualize),
    ("check", checking.check),
    ("report", reporting.report),
    ("run", running.run),
    ("tune", tuning.tune),
    ("tokenize", tokenizing.tokenize),
    ("export", exchanging.export),
    ("explain", explaining.explain),
):
    app.command(_name)(spread(_command))


_PLANS = {"advise", "compare", "plan"}  # commands that run no layers, whose memory collections may free


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit: 0 ok, 1 bug, 2 usage, 3 config, 4 plan, 5 infeasible, 6 environment, 7 run failed.

    A command whose reader goes away (`zbc explain | head -1`) ends quietly, with the code of a closed pipe. The exit
    code is also right if stderr cannot be written.
    """
    open_missing()
    if argv is None and {*sys.argv[1:2]} & _PLANS:  # many small objects: a fifth of their time was collection
        gc.set_threshold(20_000, 20, 50)
    code = _code(argv)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = EXIT_PIPE
    except OSError as error:
        failure = unwritten_stdout(error)
        show_error(failure)
        code = code or failure.exit_code
    if code == EXIT_PIPE:
        silence(sys.stdout)
    sys.exit(code)


def _code(argv: Sequence[str] | None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    if (line := retired.now(arguments)) is not None:
        tell(line)
        return 2
    arguments, old = retired.read(arguments)
    for line in old if os.environ.get("RANK", "0") == "0" else ():
        tell(line)
    try:
        app(arguments, prog_name="zbc")
    except ZbcError as error:
        show_error(error, as_json="--json" in arguments)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return EXIT_PIPE
    except SystemExit as left:  # typer's own exit, which turns a closed pipe into 1
        if isinstance(left.__context__, BrokenPipeError):
            return EXIT_PIPE
        return left.code if isinstance(left.code, int) else 0
    except Exception:
        traceback.print_exc()
        tell("this is a bug in zbc: please report it with the lines above and the job file that led to it")
        return EXIT_BUG
    return 0

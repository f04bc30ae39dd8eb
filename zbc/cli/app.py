"""The list of commands. Each module imports what it needs inside its commands, so that `zbc --help` stays fast."""

from __future__ import annotations

from typing import Annotated

import typer

from zbc import __version__
from zbc.cli import data, differing, drawing, exchanging, jobs, planning, profiling, reporting, running, simulating
from zbc.closed_pipe import to_stdout

app = typer.Typer(
    name="zbc",
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
    """Compile pipeline-parallel training schedules into proven, runnable per-rank plans."""


app.command()(jobs.init)
app.command()(drawing.schedules)
app.command()(planning.plan)
app.command()(planning.check)
app.command()(planning.compare)
app.command()(simulating.simulate)
app.command()(drawing.visualize)
app.command()(differing.diff)
app.command()(exchanging.export)
app.command("import")(exchanging.import_order)
app.command()(profiling.profile)
app.command()(running.run)
app.command()(reporting.report)
app.add_typer(jobs.config, name="config")
app.add_typer(data.data, name="data")
app.command()(jobs.explain)
app.command()(running.doctor)

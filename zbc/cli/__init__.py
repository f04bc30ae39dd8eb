"""The command line. Commands parse, make one call and print; everything they call raises `ZbcError` or returns."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from zbc.cli.app import app
from zbc.cli.console import EXIT_PIPE, show_error, tell
from zbc.errors import EXIT_BUG, EXIT_INTERRUPTED, ZbcError


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit: 0 ok, 1 bug, 2 usage, 3 config, 4 plan, 5 infeasible, 6 environment, 7 run failed."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        app(arguments, prog_name="zbc")
    except ZbcError as error:
        show_error(error, as_json="--json" in arguments)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        sys.exit(EXIT_PIPE)
    except Exception:
        traceback.print_exc()
        tell("this is a bug in zbc: please report it with the lines above and the job file that led to it")
        sys.exit(EXIT_BUG)
    sys.exit(0)

"""The command `zbc` and `python -m zbc`, also started by torchrun."""

import sys


def main() -> None:
    """Ends with 130 at Ctrl-C, without a traceback, also while the commands are imported."""
    try:
        from zbc.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()

"""`python -m zbc`, also started by torchrun."""

from zbc.cli import main

main()

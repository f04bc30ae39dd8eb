"""`python -m zbc`, which is also what torchrun starts."""

from zbc.cli import main

main()

"""A program as integers, made once from the rows of its ops: dependencies for the proof, the clock, memory."""

from zbc.compiler.graph.graph import MESSAGE, Graph, Mixed, happens, reads, run
from zbc.compiler.graph.layout import EMPTY, FAR, FREED, CellKey, Channel, EdgeValue, members
from zbc.compiler.graph.walk import build, of_steps

__all__ = [
    "EMPTY",
    "FAR",
    "FREED",
    "MESSAGE",
    "CellKey",
    "Channel",
    "EdgeValue",
    "Graph",
    "Mixed",
    "build",
    "happens",
    "members",
    "of_steps",
    "reads",
    "run",
]

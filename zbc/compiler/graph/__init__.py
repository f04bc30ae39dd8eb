"""A program as integers, made once from the rows of its ops: dependencies for the proof, the clock, memory."""

from zbc.compiler.graph.graph import Graph, happens, reads, run
from zbc.compiler.graph.walk import build, of_steps

__all__ = ["Graph", "build", "happens", "of_steps", "reads", "run"]

"""A plan's graph as GraphML, for networkx, Gephi, yEd and others."""

from __future__ import annotations

import networkx as nx


def dumps(graph: nx.DiGraph) -> str:
    """The text of a .graphml file: all nodes and edges with their attributes, see zbc/interop/digraph.py."""
    return "\n".join(nx.generate_graphml(graph)) + "\n"

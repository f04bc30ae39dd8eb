"""A plan's graph as GraphML, for networkx, Gephi, yEd and others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from xml.sax.saxutils import escape, quoteattr

import networkx as nx

_TYPES = {str: "string", int: "long", float: "double"}
_SPACE = "http://graphml.graphdrawing.org/xmlns"


def dumps(graph: nx.DiGraph) -> str:
    """The text of a .graphml file: all nodes and edges with their attributes, see zbc/interop/digraph.py."""
    return "\n".join(_lines(graph)) + "\n"  # networkx would keep a tree of all elements


def _lines(graph: nx.DiGraph) -> Iterator[str]:
    yield f'<graphml xmlns="{_SPACE}">'
    keys = dict[tuple[str, str], str]()
    for kind, every in (("node", graph.nodes.values()), ("edge", graph.edges.values())):
        for name, form in dict.fromkeys((name, type(value)) for found in every for name, value in found.items()):
            keys[kind, name] = f"d{len(keys)}"
            yield f'<key id="d{len(keys) - 1}" for="{kind}" attr.name="{name}" attr.type="{_TYPES[form]}"/>'
    yield '<graph edgedefault="directed">'
    for node, found in graph.nodes.items():
        yield f"<node id={quoteattr(node)}>{_data('node', found, keys)}</node>"
    for (a, b), found in graph.edges.items():
        yield f"<edge source={quoteattr(a)} target={quoteattr(b)}>{_data('edge', found, keys)}</edge>"
    yield "</graph>\n</graphml>"


def _data(kind: str, found: Mapping[str, Any], keys: Mapping[tuple[str, str], str]) -> str:
    return "".join(f'<data key="{keys[kind, name]}">{escape(str(value))}</data>' for name, value in found.items())

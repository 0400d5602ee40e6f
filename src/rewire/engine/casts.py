"""One cast for all who read a value in another precision.

Autocast is recorded where it happens: every layer that reads a float32 value has its own cast to
bfloat16. The plan has one of each, which is computed where the value is written, if nobody else reads that.
"""

from __future__ import annotations

from rewire.engine.graph import Graph, Node, Ref


def merge_casts(graph: Graph) -> tuple[Graph, list[int]]:
    """The graph where equal casts are one node, and for each of its nodes the node of the original one."""
    nodes: list[Node] = []
    origin: list[int] = []
    places: list[int] = []  # of the original nodes
    known: dict[Node, int] = {}

    def place(ref: Ref) -> Ref:
        return ref if ref is None or ref < 0 else places[ref]

    for index, node in enumerate(graph.nodes):
        moved = node._replace(inputs=tuple(map(place, node.inputs)))
        if node.op == "cast" and index not in graph.outputs and moved in known:
            places.append(known[moved])
            continue
        if node.op == "cast":
            known.setdefault(moved, len(nodes))
        places.append(len(nodes))
        nodes.append(moved)
        origin.append(index)
    outputs = tuple(places[i] for i in graph.outputs)
    return Graph(tuple(nodes), graph.inputs, outputs), origin

"""Turning a graph into a plan: which kernel computes what, from which buffers, forward and backward.

One function for each operation, in a module for each family. It emits the forward steps and leaves a
function that emits the backward ones; these run in reverse order. What can be fused they ask
:mod:`rewire.engine.rules`: a node that another one's kernel computes has no step of its own.

Within a region images of a batch that fills panels lie in panels, all else is batch-last. What comes in
and goes out is contiguous.
"""

from __future__ import annotations

from rewire.engine.casts import merge_casts
from rewire.engine.channels import channels_second
from rewire.engine.graph import Graph
from rewire.engine.lowering import (
    elementwise,
    group_norms,
    images,
    norms,
    pointwise,
    products,
    shapes,
    tokens,
)
from rewire.engine.lowering.base import Lowering, LowerNode
from rewire.engine.plan import Plan
from rewire.engine.rules import POINTWISE

LOWER: dict[str, LowerNode] = {
    "conv2d": products.conv2d,
    "linear": products.linear,
    "batch_norm": norms.batch_norm,
    **dict.fromkeys(POINTWISE, pointwise.pointwise),
    "add": elementwise.add,
    "cast": elementwise.cast,
    "dropout": elementwise.dropout,
    "max_pool2d": images.max_pool2d,
    "avg_pool2d": images.avg_pool2d,
    "mean": images.mean,
    "resample": images.resample,
    "slice": images.slice_,
    "pad": images.pad,
    "view": shapes.view,
    "narrow": shapes.narrow,
    "cat": shapes.cat,
    "shuffle": shapes.shuffle,
    "group_moments": group_norms.group_moments,
    "channel_norm": tokens.channel_norm,
    "turn": tokens.turn,
}


def lower(graph: Graph, panel: int) -> Plan:
    """The plan of a graph; ``panel`` is how many samples the kernels work on at once."""
    merged, first = merge_casts(graph)
    rewritten, second = channels_second(merged)
    plan = Lowering(rewritten, panel, LOWER, pointwise.add_up).plan()
    origin = [first[node] for node in second]
    for step in plan.forward + plan.backward:
        step.node = origin[step.node] if step.node >= 0 else step.node
    for shown in plan.probes.values():
        shown[:] = [(origin[node], x, dy) for node, x, dy in shown]
    return plan

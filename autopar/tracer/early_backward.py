"""In which order XLA runs losses that do not depend on each other: nodes → nodes.

A step may have several losses with parameters of their own, such as those of a coarse and a fine
network, or of a discriminator and a generator. A program computes all of them before the first
gradient. XLA, which on one device looks for the order of the least memory, differentiates a loss
as soon as it can: its activations are gone when those of the next one come.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.graph import Node, NodeKind
from autopar.tracer.regions import BACKWARD, FORWARD, UPDATE

Loops = Sequence[tuple[int, int]]


def early_backward(nodes: Sequence[Node], loops: Loops) -> list[int] | None:
    """All nodes in that order, in which loops stay in one piece; None for that of the program.

    A gradient is early if other gradients wait for products or loops of the forward pass behind
    all that it waits for. All that it depends on comes early with it."""
    producer = {v: i for i, node in enumerate(nodes) for v in node.results}
    looped = {index for loop in loops for index in range(*loop)}
    ready = _ready_after(nodes, producer, loops)
    end = max((r for r, n in zip(ready, nodes, strict=True) if n.region == BACKWARD), default=-1)
    read_by_update = (producer[v] for n in nodes if n.region == UPDATE for v in n.operands)
    frontier = [i for i in read_by_update if nodes[i].region == BACKWARD and 0 <= ready[i] < end]
    early: set[int] = set()
    while frontier:
        index = frontier.pop()
        node = nodes[index]
        if index in early or node.kind is NodeKind.INPUT or ready[index] >= index:
            continue
        early.add(index)
        frontier += [producer[v] for v in node.operands]
    if not early or not early.isdisjoint(looped):
        return None
    last_input = max(i for i, node in enumerate(nodes) if node.kind is NodeKind.INPUT)
    return sorted(
        range(len(nodes)),
        key=lambda i: (max(ready[i], last_input), i) if i in early else (i, -1),
    )


def _ready_after(nodes: Sequence[Node], producer: dict[int, int], loops: Loops) -> list[int]:
    """Per node, the last product of the forward pass that it depends on, or the end of the last
    loop; -1 if none. Products in a backward loop are recomputed there."""
    end_of: dict[int, int] = {}
    for start, stop in reversed(loops):  # outer loops come first
        is_backward = any(node.region == BACKWARD for node in nodes[start:stop])
        end_of.update(dict.fromkeys(range(start, stop), -1 if is_backward else stop - 1))
    ready: list[int] = []
    for index, node in enumerate(nodes):
        after = [ready[producer[v]] for v in node.operands if producer[v] < index]
        if node.region == FORWARD and (node.is_heavy or index in end_of):
            after.append(end_of.get(index, index))
        ready.append(max(after, default=-1) if node.region != UPDATE else -1)
    return ready

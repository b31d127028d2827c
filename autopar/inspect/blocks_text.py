"""Parallel blocks as text: from `Blocks` to a table per segment."""

from __future__ import annotations

from autopar.inspect.lines import counted, mesh_text
from autopar.ir.blocks import Block, Blocks, Segment
from autopar.ir.text import format_bytes, format_seconds, table

_HEADER = (
    "block", "entry", "module", "region", "ops", "strategies", "chosen", "spec", "deviating",
    "compute", "communication", "sent", "line",
)  # fmt: skip


def blocks_text(blocks: Blocks) -> str:
    parts = [f"{blocks_line(blocks)}, on {mesh_text(blocks.mesh_shape)}"]
    total = sum(block.cost_s for block in blocks.blocks)
    for segment in blocks.segments:
        parts.append("\n".join([_title(blocks, segment, total), *_rows(blocks, segment)]))
    parts.append(
        "strategies: those of the entry that all ops of the block can follow without resharding.\n"
        "deviating: ops that the plan shards differently, because that is cheaper.\n"
        "Seconds and bytes are per step and device, for all occurrences of a segment."
    )
    return "\n\n".join(parts)


def blocks_line(blocks: Blocks) -> str:
    """`19119 ops in 581 blocks of 25 kinds; segments of 1, 32 × 6, 3, 31 × 12 and 13 blocks`"""
    sizes = [_size(segment) for segment in blocks.segments]
    listed = " and ".join([", ".join(sizes[:-1]), sizes[-1]] if len(sizes) > 1 else sizes)
    kinds = f" of {counted(len(blocks.blocks), 'kind')}" if _are_folded(blocks) else ""
    one = "a segment" if len(sizes) == 1 else "segments"
    return (
        f"{counted(blocks.num_nodes, 'op')} in {counted(len(blocks.sequence), 'block')}{kinds}; "
        f"{one} of {listed} blocks"
    )


def _are_folded(blocks: Blocks) -> bool:
    return len(blocks.blocks) < len(blocks.sequence)


def _size(segment: Segment) -> str:
    count = f"{segment.count} × " if segment.count > 1 else ""
    return f"{count}{len(segment.blocks)}"


def _title(blocks: Blocks, segment: Segment, total: float) -> str:
    cost = sum(
        blocks.blocks[entry.block].cost_s / blocks.blocks[entry.block].count
        for occurrence in blocks.occurrences(segment)
        for entry in occurrence
    )
    times = f", {segment.count} times" if segment.count > 1 else ""
    share = f", {cost / total:.0%} of the step" if total else ""
    size = counted(len(segment.blocks), "block")
    return f"{segment.name}: {size}{times}, {format_seconds(cost)}{share}"


def _rows(blocks: Blocks, segment: Segment) -> list[str]:
    rows = []
    for at, occurrences in enumerate(zip(*blocks.occurrences(segment), strict=True)):
        first = blocks.blocks[segment.blocks[at]]
        # A block may occur in other segments too, and equal layers may be different blocks.
        each = [blocks.blocks[one.block] for one in occurrences]
        rows.append(
            _row(
                first,
                sum(b.compute_s / b.count for b in each),
                sum(b.communication_s / b.count for b in each),
                sum(b.communication_bytes / b.count for b in each),
            )
        )
    return table(_HEADER, rows)


def _row(
    block: Block, compute_s: float, communication_s: float, num_bytes: float
) -> tuple[str, ...]:
    return (
        block.name.removeprefix("block "),
        block.operator,
        block.module or "-",
        block.region,
        str(len(block.nodes)),
        str(block.num_strategies),
        block.words or "-",
        block.spec,
        str(block.num_deviating) if block.num_deviating else "-",
        format_seconds(compute_s),
        format_seconds(communication_s) if communication_s else "-",
        format_bytes(num_bytes) if num_bytes else "-",
        block.source or "-",
    )

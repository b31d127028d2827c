"""Times of a pipeline: from a `Pipeline` and seconds to `PipelineTimes`, and back.

Most arrays that cross between stages do so together: the same stage programs make them, they take
the same routes, and the same stage programs read them. They become one transfer. The way back gives
a pipeline with one array per transfer and nothing else; under any schedule its instruction lists
have the runs, sends and receives of the original, in the same order. So a plan file suffices to
simulate a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from autopar.cost.simulator import TransferTime
from autopar.ir.pipeline import (
    EACH,
    PER_MICRO_BATCH,
    Phase,
    Pipeline,
    Place,
    Ref,
    StageProgram,
    Transfer,
)
from autopar.ir.timeline import MeshTransferTime, PipelineTimes, StageProgramTime

_Touch = tuple[int, int | None]  # stage program, micro-batch of the array that it touches


def pipeline_times(
    pipeline: Pipeline,
    stage_program_s: Sequence[float],
    transfers: Sequence[TransferTime],
    held_bytes: Sequence[float] = (),
    kept_bytes: Sequence[float] = (),
    working_bytes: Sequence[float] = (),
) -> PipelineTimes:
    """`stage_program_s`: of one run of each stage program. `transfers`: of each transfer, for one
    micro-batch."""

    def per_stage(*phases: Phase) -> tuple[float, ...]:
        return tuple(
            sum(
                seconds
                for stage_program, seconds in zip(
                    pipeline.stage_programs, stage_program_s, strict=True
                )
                if stage_program.stage == stage and stage_program.phase in phases
            )
            for stage in range(pipeline.num_stages)
        )

    has_weights = any(
        stage_program.phase is Phase.WEIGHTS for stage_program in pipeline.stage_programs
    )
    return PipelineTimes(
        forward_s=per_stage(Phase.FORWARD),
        backward_s=per_stage(Phase.BACKWARD),
        weights_s=per_stage(Phase.WEIGHTS) if has_weights else (),
        update_s=per_stage(Phase.PREPARE, Phase.UPDATE),
        crossings=_merged_transfers(pipeline, transfers),
        stage_programs=tuple(
            StageProgramTime(
                stage_program.stage, stage_program.phase.value, stage_program.part, seconds
            )
            for stage_program, seconds in zip(pipeline.stage_programs, stage_program_s, strict=True)
        ),
        held_bytes=tuple(held_bytes),
        kept_bytes=tuple(kept_bytes),
        working_bytes=tuple(working_bytes),
    )


def _merged_transfers(
    pipeline: Pipeline, transfers: Sequence[TransferTime]
) -> tuple[MeshTransferTime, ...]:
    """One time for all transfers between the same meshes of arrays that go together."""
    sent = {transfer.ref.value for transfer in pipeline.transfers}
    writers: dict[int, list[_Touch]] = defaultdict(list)
    readers: dict[int, list[_Touch]] = defaultdict(list)
    for number, stage_program in enumerate(pipeline.stage_programs):
        for refs, touches in ((stage_program.writes, writers), (stage_program.reads, readers)):
            for ref in refs:
                if ref.value in sent:
                    touches[ref.value].append((number, ref.micro_batch))
    for touches in (writers, readers):
        for value, all_touches in touches.items():
            touches[value] = _shortened(all_touches, pipeline)
    routes: dict[int, list[tuple[int, int, int | None]]] = defaultdict(list)
    for transfer in pipeline.transfers:
        routes[transfer.ref.value].append(
            (transfer.source, transfer.target, transfer.ref.micro_batch)
        )
    results: dict[int, set[int]] = defaultdict(set)
    for place in pipeline.outputs:
        results[place.value].add(place.stage)
    given: dict[int, set[int]] = defaultdict(set)
    for place in pipeline.inputs:
        given[place.value].add(place.stage)
    classes: dict[tuple, int] = {}
    merged: dict[tuple, MeshTransferTime] = {}
    for transfer, time in zip(pipeline.transfers, transfers, strict=True):
        value, (source, target) = transfer.ref.value, (transfer.source, transfer.target)
        role = (
            tuple(writers[value]),
            tuple(readers[value]),
            tuple(routes[value]),
            frozenset(results[value]),
            frozenset(given[value]),
        )
        number = classes.setdefault(role, len(classes))
        key = number, source, target, transfer.ref.micro_batch
        known = merged.get(key)
        latency_s = max(time.latency_s, known.latency_s if known else 0.0)
        rest_s = time.seconds - time.latency_s
        if known is not None:
            rest_s += known.seconds - known.latency_s
        merged[key] = MeshTransferTime(
            source=source,
            target=target,
            phase=_phase(pipeline, writers[value], transfer.ref.micro_batch),
            num_bytes=time.num_bytes + (known.num_bytes if known else 0.0),
            seconds=latency_s + rest_s,
            latency_s=latency_s,
            value=number,
            micro_batch=transfer.ref.micro_batch,
            writers=tuple(writers[value]),
            readers=tuple(readers[value]),
            is_result=target in results[value],
        )
    return tuple(merged.values())


def _shortened(touches: Sequence[_Touch], pipeline: Pipeline) -> list[_Touch]:
    """The touches, with one entry for a stage program that runs once per step and touches the
    arrays of all micro-batches."""
    by_stage_program: dict[int, list[int | None]] = defaultdict(list)
    for number, micro_batch in touches:
        by_stage_program[number].append(micro_batch)
    everything = set(range(pipeline.num_micro_batches))
    short: list[_Touch] = []
    for number, touched in sorted(by_stage_program.items()):
        is_per_step = pipeline.stage_programs[number].phase not in PER_MICRO_BATCH
        if is_per_step and None not in touched and set(touched) == everything:
            short.append((number, EACH))
        else:
            short += ((number, m) for m in sorted(touched, key=lambda m: -2 if m is None else m))
    return short


def _phase(pipeline: Pipeline, writers: Sequence[_Touch], micro_batch: int | None) -> str:
    if micro_batch is None or not writers:
        return ""
    phase = pipeline.stage_programs[writers[-1][0]].phase
    return phase.value if phase in PER_MICRO_BATCH else ""


def pipeline_of_times(
    times: PipelineTimes, stage_mesh: Sequence[int], num_micro_batches: int
) -> tuple[Pipeline, list[float], list[TransferTime]]:
    """A pipeline with these stage programs and one array per transfer; the seconds of its stage
    programs and of its transfers."""
    reads: list[dict[Ref, None]] = [{} for _ in times.stage_programs]
    writes: list[dict[Ref, None]] = [{} for _ in times.stage_programs]
    phases = [Phase(stage_program.phase) for stage_program in times.stage_programs]

    def refs(value: int, number: int, micro_batch: int | None) -> list[Ref]:
        if micro_batch == EACH and phases[number] not in PER_MICRO_BATCH:
            return [Ref(value, m) for m in range(num_micro_batches)]
        return [Ref(value, micro_batch)]

    targets: dict[int, set[int]] = defaultdict(set)
    for transfer in times.crossings:
        targets[transfer.value].add(transfer.target)
    inputs: dict[Place, None] = {}
    outputs: dict[Place, None] = {}
    for transfer in times.crossings:
        value = transfer.value
        for touches, side in ((transfer.writers, writes), (transfer.readers, reads)):
            for number, micro_batch in touches:
                side[number].update(dict.fromkeys(refs(value, number, micro_batch)))
        if not transfer.writers and transfer.source not in targets[value]:
            inputs[Place(value, transfer.source)] = None
        if transfer.is_result:
            outputs[Place(value, transfer.target)] = None
    pipeline = Pipeline(
        num_micro_batches,
        tuple(stage_mesh),
        tuple(
            StageProgram(
                stage_program.stage, phase, tuple(read), tuple(written), stage_program.part
            )
            for stage_program, phase, read, written in zip(
                times.stage_programs, phases, reads, writes, strict=True
            )
        ),
        tuple(Transfer(Ref(c.value, c.micro_batch), c.source, c.target) for c in times.crossings),
        tuple(inputs),
        tuple(outputs),
    )
    return (
        pipeline,
        [stage_program.seconds for stage_program in times.stage_programs],
        [TransferTime(c.num_bytes, c.seconds, c.latency_s) for c in times.crossings],
    )

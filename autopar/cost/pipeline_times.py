"""A pipeline as its times: from a `Pipeline` and seconds to `PipelineTimes`, and back.

Most arrays that cross between stages do so side by side: made by the same stage programs, sent the
same ways, read by the same stage programs. They become one crossing. What comes back is a pipeline
in which each crossing is one array and everything else is left out; under any schedule its lists
have the runs, sends and receives of the first one, in the same order. So a plan file can tell when
what runs.
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
    once = (Phase.PREPARE, Phase.UPDATE)

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
        per_stage(Phase.FORWARD),
        per_stage(Phase.BACKWARD),
        per_stage(Phase.WEIGHTS) if has_weights else (),
        per_stage(*once),
        _crossings(pipeline, transfers),
        tuple(
            StageProgramTime(
                stage_program.stage, stage_program.phase.value, stage_program.part, seconds
            )
            for stage_program, seconds in zip(pipeline.stage_programs, stage_program_s, strict=True)
        ),
        tuple(held_bytes),
        tuple(kept_bytes),
        tuple(working_bytes),
    )


def _crossings(
    pipeline: Pipeline, transfers: Sequence[TransferTime]
) -> tuple[MeshTransferTime, ...]:
    sent = {transfer.ref.value for transfer in pipeline.transfers}
    writers: dict[int, list[_Touch]] = defaultdict(list)
    readers: dict[int, list[_Touch]] = defaultdict(list)
    for number, stage_program in enumerate(pipeline.stage_programs):
        for refs, touches in ((stage_program.writes, writers), (stage_program.reads, readers)):
            for ref in refs:
                if ref.value in sent:
                    touches[ref.value].append((number, ref.micro_batch))
    for touches in (writers, readers):
        for value, own in touches.items():
            touches[value] = _shortened(own, pipeline)
    ways: dict[int, list[tuple[int, int, int | None]]] = defaultdict(list)
    for transfer in pipeline.transfers:
        ways[transfer.ref.value].append(
            (transfer.source, transfer.target, transfer.ref.micro_batch)
        )
    results: dict[int, set[int]] = defaultdict(set)
    for place in pipeline.outputs:
        results[place.value].add(place.stage)
    given: dict[int, set[int]] = defaultdict(set)
    for place in pipeline.inputs:
        given[place.value].add(place.stage)
    classes: dict[tuple, int] = {}
    found: dict[tuple, MeshTransferTime] = {}
    for transfer, time in zip(pipeline.transfers, transfers, strict=True):
        value, (source, target) = transfer.ref.value, (transfer.source, transfer.target)
        role = (
            tuple(writers[value]),
            tuple(readers[value]),
            tuple(ways[value]),
            frozenset(results[value]),
            frozenset(given[value]),
        )
        number = classes.setdefault(role, len(classes))
        key = number, source, target, transfer.ref.micro_batch
        known = found.get(key)
        latency_s = max(time.latency_s, known.latency_s if known else 0.0)
        rest_s = time.seconds - time.latency_s
        if known is not None:
            rest_s += known.seconds - known.latency_s
        found[key] = MeshTransferTime(
            source,
            target,
            _phase(pipeline, writers[value], transfer.ref.micro_batch),
            time.num_bytes + (known.num_bytes if known else 0.0),
            latency_s + rest_s,
            latency_s,
            number,
            transfer.ref.micro_batch,
            tuple(writers[value]),
            tuple(readers[value]),
            target in results[value],
        )
    return tuple(found.values())


def _shortened(touches: Sequence[_Touch], pipeline: Pipeline) -> list[_Touch]:
    """A stage program that runs once and touches the arrays of all micro-batches is told once."""
    by_stage_program: dict[int, list[int | None]] = defaultdict(list)
    for number, micro_batch in touches:
        by_stage_program[number].append(micro_batch)
    everything = set(range(pipeline.num_micro_batches))
    short: list[_Touch] = []
    for number, own in sorted(by_stage_program.items()):
        is_once = pipeline.stage_programs[number].phase not in PER_MICRO_BATCH
        if is_once and None not in own and set(own) == everything:
            short.append((number, EACH))
        else:
            short += ((number, m) for m in sorted(own, key=lambda m: -2 if m is None else m))
    return short


def _phase(pipeline: Pipeline, writers: Sequence[_Touch], micro_batch: int | None) -> str:
    if micro_batch is None or not writers:
        return ""
    phase = pipeline.stage_programs[writers[-1][0]].phase
    return phase.value if phase in PER_MICRO_BATCH else ""


def pipeline_of_times(
    times: PipelineTimes, stage_mesh: Sequence[int], num_micro_batches: int
) -> tuple[Pipeline, list[float], list[TransferTime]]:
    """A pipeline with as many stage programs and one array per crossing; the seconds of its stage
    programs, and of its transfers."""
    reads: list[dict[Ref, None]] = [{} for _ in times.stage_programs]
    writes: list[dict[Ref, None]] = [{} for _ in times.stage_programs]
    phases = [Phase(stage_program.phase) for stage_program in times.stage_programs]

    def refs(value: int, number: int, micro_batch: int | None) -> list[Ref]:
        if micro_batch == EACH and phases[number] not in PER_MICRO_BATCH:
            return [Ref(value, m) for m in range(num_micro_batches)]
        return [Ref(value, micro_batch)]

    targets: dict[int, set[int]] = defaultdict(set)
    for crossing in times.crossings:
        targets[crossing.value].add(crossing.target)
    inputs: dict[Place, None] = {}
    outputs: dict[Place, None] = {}
    for crossing in times.crossings:
        value = crossing.value
        for touches, side in ((crossing.writers, writes), (crossing.readers, reads)):
            for number, micro_batch in touches:
                side[number].update(dict.fromkeys(refs(value, number, micro_batch)))
        if not crossing.writers and crossing.source not in targets[value]:
            inputs[Place(value, crossing.source)] = None
        if crossing.is_result:
            outputs[Place(value, crossing.target)] = None
    pipeline = Pipeline(
        num_micro_batches,
        tuple(stage_mesh),
        tuple(
            StageProgram(
                stage_program.stage, phase, tuple(own_reads), tuple(own_writes), stage_program.part
            )
            for stage_program, phase, own_reads, own_writes in zip(
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

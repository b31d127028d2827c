"""The event simulator, judged by a second way to time a schedule, by closed forms, and by laws."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost.pipeline_times import pipeline_of_times, pipeline_times
from autopar.cost.simulator import (
    SimulationInput,
    SimulationResult,
    TransferTime,
    host_routes,
    simulate,
    simulation_input,
    timeline,
)
from autopar.ir.pipeline import EACH, Phase, Pipeline, PipelinePrograms, Run
from autopar.ir.schedule import SCHEDULES, Schedule
from autopar.lower.instructions import emit_programs
from autopar.lower.schedules import make_schedule
from autopar.stages.simulate import predicted_s
from tests.properties.clock_by_clock import chain_times, step_by_clocks
from tests.properties.test_pipeline_programs import random_case

some = settings(deadline=None, max_examples=15)
seeds = st.integers(0, 2**32 - 1)
FORWARD, BACKWARD, WEIGHTS, UPDATE = Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHTS, Phase.UPDATE


def random_times(pipeline: Pipeline, rng: random.Random) -> tuple[list[float], list[TransferTime]]:
    stage_program_s = [float(rng.randint(0, 9)) for _ in pipeline.stage_programs]
    transfers = []
    for _ in pipeline.transfers:
        latency_s = float(rng.randint(0, 2))
        transfers.append(TransferTime(1.0, latency_s + rng.randint(0, 4), latency_s))
    return stage_program_s, transfers


def random_work(
    name: str, rng: random.Random
) -> tuple[Pipeline, PipelinePrograms, list[float], list[TransferTime]]:
    pipeline, schedule = random_case(name, rng)
    return pipeline, emit_programs(pipeline, schedule), *random_times(pipeline, rng)


def random_hosts(pipeline: Pipeline, rng: random.Random) -> list[frozenset[int]]:
    return [frozenset([rng.randint(0, 2)]) for _ in range(pipeline.num_meshes)]


def chain(name: str, rng: random.Random, *, crossing: int) -> tuple[Schedule, dict, list[int]]:
    """A pipeline of neighbours that send to each other: schedule, seconds, seconds between."""
    num_meshes, m = rng.randint(1, 5), rng.randint(1, 8)
    stage_mesh = list(range(num_meshes))
    if name == "interleaved_1f1b":
        stage_mesh *= 2
    phases = {"inference": [FORWARD], "zero_bubble": [FORWARD, BACKWARD, WEIGHTS, UPDATE]}
    own = phases.get(name, [FORWARD, BACKWARD, UPDATE])
    seconds = {phase: [rng.randint(0, 9) for _ in stage_mesh] for phase in own}
    between = [rng.randint(0, crossing) for _ in stage_mesh[1:]]
    schedule = make_schedule(name, len(stage_mesh), m, stage_mesh=stage_mesh)
    return schedule, seconds, between


@pytest.mark.parametrize("name", SCHEDULES)
@some
@given(seeds)
def test_lists_and_times_of_a_pipeline_agree(name: str, seed: int):
    """A pipeline, and the one that its `PipelineTimes` tell of, run alike."""
    rng = random.Random(seed)
    pipeline, schedule = random_case(name, rng)
    stage_program_s, transfers = random_times(pipeline, rng)
    routes = host_routes(random_hosts(pipeline, rng))
    times = pipeline_times(pipeline, stage_program_s, transfers)
    short = pipeline_of_times(times, pipeline.stage_mesh, pipeline.num_micro_batches)
    lines = []
    for own, own_s, own_transfers in ((pipeline, stage_program_s, transfers), short):
        programs = emit_programs(own, schedule)
        work = simulation_input(own, programs, own_s, own_transfers, routes)
        lines.append(timeline(own, programs, work, simulate(work)))
    assert lines[0] == lines[1]


@pytest.mark.parametrize("name", SCHEDULES)
@some
@given(seeds)
def test_neighbours_take_what_the_clocks_say(name: str, seed: int):
    schedule, seconds, between = chain(name, random.Random(seed), crossing=5)
    found = predicted_s(chain_times(seconds, between), schedule)
    expected = step_by_clocks(schedule, seconds, between)
    if schedule.eager:  # there the clocks let transfers share a link, and start before the `Recv`
        assert found >= expected
    else:
        assert found == expected


@some
@given(seeds)
def test_eager_schedules_without_transfers_take_what_the_clocks_say(seed: int):
    schedule, seconds, between = chain("1f1b_eager", random.Random(seed), crossing=0)
    found = predicted_s(chain_times(seconds, between), schedule)
    assert found == step_by_clocks(schedule, seconds, between)


@some
@given(st.integers(1, 5), st.integers(1, 9), seeds)
def test_the_closed_form_of_alpa(b: int, m: int, seed: int):
    """Σ t + (m − 1)·max t, with t what a stage takes for both passes of a micro-batch. It is exact
    without a backward pass. Where backward passes take as much longer than forward passes on all
    stages, it is exact for GPipe, and 1F1B takes at most so much. It is always a lower bound for
    GPipe; 1F1B may take more or less if stages differ in that."""
    rng = random.Random(seed)
    forward_s = [rng.randint(0, 9) for _ in range(b)]
    ratio = rng.randint(0, 3)
    none = [0] * (b - 1)

    def found(name: str, backward_s: list[int] | None) -> float:
        seconds = {FORWARD: forward_s}
        if backward_s is not None:
            seconds |= {BACKWARD: backward_s}
        return predicted_s(chain_times(seconds, none), make_schedule(name, b, m))

    def closed_form(backward_s: list[int]) -> int:
        both = [f + g for f, g in zip(forward_s, backward_s, strict=True)]
        return sum(both) + (m - 1) * max(both)

    in_proportion = [ratio * f for f in forward_s]
    assert found("inference", None) == closed_form([0] * b)
    assert found("gpipe", in_proportion) == closed_form(in_proportion)
    for name in ("1f1b", "1f1b_eager"):
        assert found(name, in_proportion) <= closed_form(in_proportion)
    free = [rng.randint(0, 9) for _ in range(b)]
    assert found("gpipe", free) >= closed_form(free)


@pytest.mark.parametrize("name", SCHEDULES)
@some
@given(seeds)
def test_longer_instructions_make_no_step_shorter(name: str, seed: int):
    """Where every pair of meshes has a link of its own, and receives in the order of sending, which
    meshes with several stages do not."""
    rng = random.Random(seed)
    is_interleaved = name == "interleaved_1f1b"
    schedule, seconds, between = chain(name, rng, crossing=0 if is_interleaved else 4)
    times = chain_times(seconds, between)
    before, more = predicted_s(times, schedule), float(rng.randint(1, 9))
    kind = (
        "stage_programs"
        if is_interleaved or not times.crossings
        else rng.choice(["stage_programs", "crossings"])
    )
    entries = list(getattr(times, kind))
    number = rng.randrange(len(entries))
    entries[number] = replace(entries[number], seconds=entries[number].seconds + more)
    longer = replace(times, **{kind: tuple(entries)})
    assert predicted_s(longer, schedule) >= before


@pytest.mark.parametrize("name", SCHEDULES)
@some
@given(seeds)
def test_no_step_is_shorter_than_its_longest_path(name: str, seed: int):
    """Whatever shares a network: the longest path through the lists is the least; a mesh is never
    busy with two runs; and a way never carries two transfers."""
    rng = random.Random(seed)
    pipeline, programs, stage_program_s, transfers = random_work(name, rng)
    routes = host_routes(random_hosts(pipeline, rng))
    work = simulation_input(pipeline, programs, stage_program_s, transfers, routes)
    found = simulate(work)
    assert found.step_s >= longest_path(work)
    for mesh, program in enumerate(programs.meshes):
        runs = [
            stage_program_s[i.stage_program] for i in program.instructions if isinstance(i, Run)
        ]
        assert found.step_s >= sum(runs)
        ends = [a + s for a, s in zip(found.run_starts_s[mesh], runs, strict=True)]
        later = [*found.run_starts_s[mesh], found.step_s][1:]
        assert all(end <= start for end, start in zip(ends, later, strict=True))
    for link in range(work.num_links):
        own = sorted(t for t, s in zip(found.sent_s, work.sent, strict=True) if link in s.links)
        assert all(one[1] <= two[0] for one, two in pairwise(own))
    check_order(work, found)


def longest_path(work: SimulationInput) -> float:
    """By repeated relaxation, as if every transfer had a way of its own."""
    arrival = [0.0] * len(work.sent)
    end = 0.0
    for _ in range(len(work.sent) + 2):
        reached = [0.0] * len(work.sent)
        ends = []
        for steps in work.meshes:
            now = 0.0
            for code, value, waits in steps:
                start = max([now, *(arrival[n] for n in waits)])
                if code == 0:
                    now = start + value
                else:
                    reached[int(value)] = max(reached[int(value)], start)
            ends.append(now)
        arrival = [r + s.seconds for r, s in zip(reached, work.sent, strict=True)]
        end = max([*ends, *arrival])
    return end


def check_order(work: SimulationInput, found: SimulationResult) -> None:
    """Nothing starts before what it waits for."""
    for mesh, steps in enumerate(work.meshes):
        starts = iter(found.run_starts_s[mesh])
        now = 0.0
        for code, value, waits in steps:
            if code == 0:
                start = next(starts)
                assert start >= max([now, *(found.sent_s[n][1] for n in waits)])
                now = start + value
            else:
                assert found.sent_s[int(value)][0] >= now


@some
@given(st.sampled_from(SCHEDULES), seeds)
def test_events_are_the_instructions(name: str, seed: int):
    rng = random.Random(seed)
    pipeline, programs, stage_program_s, transfers = random_work(name, rng)
    work = simulation_input(pipeline, programs, stage_program_s, transfers)
    line = timeline(pipeline, programs, work, simulate(work), bytes_of=lambda stage, ref: 1)
    assert len(line.events) == work.num_events
    runs = [event for event in line.events if event.kind == "run"]
    assert sum(event.end_s - event.start_s for event in runs) == sum(line.busy_s())
    sends, recvs = (
        sorted((e.start_s, e.end_s, e.name, str(e.micro_batch)) for e in line.events if e.kind == k)
        for k in ("send", "recv")
    )
    assert sends == recvs
    assert all(at >= 0 and held >= 0 for own in line.memory for at, held in own)


def test_what_leaves_a_host_shares_its_network():
    """Two pairs of meshes: inside of hosts they do not meet, between hosts they do."""
    seconds = {FORWARD: [1.0, 1.0]}
    times = chain_times(seconds, [4.0])
    stage_programs = [
        *times.stage_programs,
        *(replace(p, stage=p.stage + 2) for p in times.stage_programs),
    ]
    other = replace(
        times.crossings[0],
        source=2,
        target=3,
        value=1,
        writers=((2, EACH),),
        readers=((3, EACH),),
    )
    times = replace(
        times, stage_programs=tuple(stage_programs), crossings=(*times.crossings, other)
    )
    schedule = make_schedule("inference", 4, 1)
    apart = [frozenset([0]), frozenset([0]), frozenset([1]), frozenset([1])]
    shared = [frozenset([0]), frozenset([1]), frozenset([0]), frozenset([1])]
    assert predicted_s(times, schedule, apart) == 6.0
    assert predicted_s(times, schedule, shared) == 10.0

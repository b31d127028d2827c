"""Instruction lists, tested by running them: random pipelines under every schedule give the same
symbols as their stage programs one after another, and wrong lists are detected."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar.ir.checks import check_programs
from autopar.ir.live import live_buffers
from autopar.ir.pipeline import (
    PER_MICRO_BATCH,
    Free,
    Instruction,
    Pipeline,
    PipelinePrograms,
    Recv,
    Run,
    Send,
)
from autopar.ir.schedule import SCHEDULES, Schedule
from autopar.lower.instructions import emit_programs
from autopar.lower.schedules import check_schedule, in_flight, in_flight_bound, make_schedule
from tests.properties.random_pipelines import random_pipeline, run_lists, run_stage_programs

some = settings(deadline=None, max_examples=60)
seeds = st.integers(0, 2**32 - 1)


def random_case(name: str, rng: random.Random) -> tuple[Pipeline, Schedule]:
    m = rng.randint(1, 5)
    num_stages = rng.randint(1, 5)
    if name == "interleaved_1f1b":
        num_meshes = rng.randint(1, 3)
        stage_mesh = tuple(k % num_meshes for k in range(num_meshes * rng.randint(1, 2)))
    elif rng.random() < 0.5:
        stage_mesh = tuple(range(num_stages))
    else:
        num_meshes = rng.randint(1, num_stages)
        extra = [rng.randrange(num_meshes) for _ in range(num_stages - num_meshes)]
        stage_mesh = tuple(rng.sample([*range(num_meshes), *extra], num_stages))
    num_phases = 1 if name == "inference" else 3 if name == "zero_bubble" else rng.randint(1, 3)
    pipeline = random_pipeline(rng, m, stage_mesh, PER_MICRO_BATCH[:num_phases])
    return pipeline, make_schedule(name, len(stage_mesh), m, stage_mesh=stage_mesh)


@pytest.mark.representatives("1f1b", "interleaved_1f1b")
@pytest.mark.parametrize("name", SCHEDULES)
@some
@given(seeds)
def test_lists_give_what_the_stage_programs_give(name: str, seed: int):
    rng = random.Random(seed)
    pipeline, schedule = random_case(name, rng)
    programs = emit_programs(pipeline, schedule)
    check_programs(pipeline, programs)
    assert run_lists(pipeline, programs, rng) == run_stage_programs(pipeline)


@pytest.mark.representatives("1f1b")
@pytest.mark.parametrize("name", SCHEDULES)
@some
@given(seeds)
def test_what_is_kept_is_what_is_live_at_the_end(name: str, seed: int):
    pipeline, schedule = random_case(name, random.Random(seed))
    programs = emit_programs(pipeline, schedule)
    for mesh, (program, live) in enumerate(
        zip(programs.meshes, live_buffers(programs), strict=True)
    ):
        callers = {b for n, b in program.inputs if n not in pipeline.donated}
        results = {b for _, b in program.outputs}
        if live:
            assert live[-1] == len(callers | results), f"mesh {mesh}"


@pytest.mark.representatives("1f1b")
@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "interleaved_1f1b"])
@some
@given(st.integers(1, 6), st.integers(1, 9), seeds)
def test_stages_on_shared_meshes_keep_to_the_bound(name: str, num_stages: int, m: int, seed: int):
    rng = random.Random(seed)
    num_meshes = rng.randint(1, num_stages)
    extra = [rng.randrange(num_meshes) for _ in range(num_stages - num_meshes)]
    stage_mesh = rng.sample([*range(num_meshes), *extra], num_stages)
    schedule = make_schedule(name, num_stages, m, stage_mesh=stage_mesh)
    check_schedule(schedule)
    for stage, kept in enumerate(in_flight(schedule)):
        assert kept <= in_flight_bound(name, num_stages, m, stage)


# -- wrong lists

Edit = Callable[[list[Instruction], random.Random], bool]  # changes a list; False if it cannot


def drop(instructions: list[Instruction], rng: random.Random) -> bool:
    del instructions[rng.randrange(len(instructions))]
    return True


def repeat(instructions: list[Instruction], rng: random.Random) -> bool:
    position = rng.randrange(len(instructions))
    instructions.insert(rng.randint(position, len(instructions)), instructions[position])
    return True


def free_twice(instructions: list[Instruction], rng: random.Random) -> bool:
    frees = [n for n, i in enumerate(instructions) if isinstance(i, Free)]
    if not frees:
        return False
    free = instructions[rng.choice(frees)]
    assert isinstance(free, Free)
    position = rng.randint(0, len(instructions))
    instructions.insert(position, Free((rng.choice(free.buffers),)))
    return True


def receive_late(instructions: list[Instruction], rng: random.Random) -> bool:
    """Swaps a receive with the stage program right after it, which reads it."""
    pairs = [
        n
        for n in range(1, len(instructions))
        if isinstance(recv := instructions[n - 1], Recv)
        and isinstance(run := instructions[n], Run)
        and not set(recv.buffers).isdisjoint(run.reads)
    ]
    if not pairs:
        return False
    n = rng.choice(pairs)
    instructions[n - 1 : n + 1] = instructions[n], instructions[n - 1]
    return True


def other_buffer(instructions: list[Instruction], rng: random.Random) -> bool:
    """One buffer of an instruction becomes another one of the same list."""
    numbers = sorted({b for i in instructions for b in _buffers(i)})
    position = rng.randrange(len(instructions))
    old = instructions[position]
    if len(numbers) < 2 or not _buffers(old):
        return False
    victim = rng.choice(_buffers(old))
    new = rng.choice([n for n in numbers if n != victim])

    def swapped(buffers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(new if b == victim else b for b in buffers)

    match old:
        case Run():
            changed = replace(old, reads=swapped(old.reads), writes=swapped(old.writes))
        case Send() | Recv() | Free():
            changed = replace(old, buffers=swapped(old.buffers))
    if isinstance(old, Free) and set(changed.buffers) == set(old.buffers):
        return False
    instructions[position] = changed
    return True


def _buffers(instruction: Instruction) -> tuple[int, ...]:
    if isinstance(instruction, Run):
        return (*instruction.reads, *instruction.writes)
    return instruction.buffers


@pytest.mark.parametrize("edit", [drop, repeat, free_twice, receive_late, other_buffer])
@some
@given(st.sampled_from(SCHEDULES), seeds)
def test_a_list_that_was_made_wrong_is_found(edit: Edit, name: str, seed: int):
    rng = random.Random(seed)
    pipeline, schedule = random_case(name, rng)
    programs = emit_programs(pipeline, schedule)
    mesh = rng.randrange(pipeline.num_meshes)
    instructions = list(programs.meshes[mesh].instructions)
    assume(instructions and edit(instructions, rng))
    with pytest.raises(AssertionError):
        check_programs(pipeline, _with_list(programs, mesh, instructions))


@some
@given(st.sampled_from(SCHEDULES), seeds)
def test_neighbours_that_may_be_swapped_change_nothing(name: str, seed: int):
    """Whatever order the checker lets pass gives the same results."""
    rng = random.Random(seed)
    pipeline, schedule = random_case(name, rng)
    programs = emit_programs(pipeline, schedule)
    expected = run_stage_programs(pipeline)
    places = [
        (mesh, n)
        for mesh, program in enumerate(programs.meshes)
        for n in range(1, len(program.instructions))
    ]
    for mesh, n in rng.sample(places, min(len(places), 8)):
        instructions = list(programs.meshes[mesh].instructions)
        instructions[n - 1], instructions[n] = instructions[n], instructions[n - 1]
        swapped = _with_list(programs, mesh, instructions)
        try:
            check_programs(pipeline, swapped)
        except AssertionError:
            continue
        assert run_lists(pipeline, swapped, rng) == expected


@some
@given(st.sampled_from(SCHEDULES), seeds)
def test_more_than_may_be_used_up_is_found(name: str, seed: int):
    """`donated` is the most that can be: one position more is wrong, in some run of the stage
    program."""
    rng = random.Random(seed)
    pipeline, schedule = random_case(name, rng)
    programs = emit_programs(pipeline, schedule)
    for p, stage_program in enumerate(pipeline.stage_programs):
        for position in set(range(len(stage_program.reads))) - set(programs.donated[p]):
            more = list(programs.donated)
            more[p] = (*more[p], position)
            with pytest.raises(AssertionError):
                check_programs(pipeline, replace(programs, donated=tuple(more)))


def _with_list(
    programs: PipelinePrograms, mesh: int, instructions: list[Instruction]
) -> PipelinePrograms:
    meshes = list(programs.meshes)
    meshes[mesh] = replace(meshes[mesh], instructions=tuple(instructions))
    return replace(programs, meshes=tuple(meshes))

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.ir.checks import check_programs
from autopar.ir.live import buffer_slots, bytes_over_time, live_buffers, live_bytes
from autopar.ir.pipeline import (
    EACH,
    Free,
    Phase,
    Pipeline,
    PipelinePrograms,
    Place,
    Recv,
    Ref,
    Run,
    Send,
    StageProgram,
    Transfer,
)
from autopar.lower.instructions import emit_programs
from autopar.lower.schedules import make_schedule

# Values: arguments, then what is there for each micro-batch, then once per step.
W0, W1, BATCH = 0, 1, 2
X, H, DH = 10, 11, 12
G0, G1, NEW_W0, NEW_W1, NORM = 20, 21, 22, 23, 24
NAMES = {
    value: name for name, value in list(globals().items()) if name.isupper() and name != "EACH"
}


def once(*values: int) -> tuple[Ref, ...]:
    return tuple(Ref(value, None) for value in values)


def each(*values: int) -> tuple[Ref, ...]:
    return tuple(Ref(value, EACH) for value in values)


def two_stages(stage_mesh: tuple[int, ...] = (0, 1), donated: tuple[int, ...] = (0,)) -> Pipeline:
    """Two micro-batches. Stage 0 holds w0 and the batch, stage 1 holds w1, which is handed on."""
    stage_programs = (
        StageProgram(0, Phase.PREPARE, once(BATCH), (Ref(X, 0), Ref(X, 1), *once(G0))),
        StageProgram(1, Phase.PREPARE, (), once(G1)),
        StageProgram(0, Phase.FORWARD, (*once(W0), *each(X)), each(H)),
        StageProgram(1, Phase.FORWARD, (*once(W1), *each(H), *once(G1)), (*each(DH), *once(G1))),
        StageProgram(0, Phase.BACKWARD, (*each(X, DH), *once(G0)), once(G0)),
        StageProgram(1, Phase.UPDATE, once(G1), once(NORM)),
        StageProgram(0, Phase.UPDATE, once(W0, G0, NORM), once(NEW_W0)),
    )
    transfers = (
        Transfer(Ref(H, EACH), 0, 1),
        Transfer(Ref(DH, EACH), 1, 0),
        Transfer(Ref(NORM, None), 1, 0),
    )
    inputs = Place(W0, 0), Place(W1, 1), Place(BATCH, 0)
    outputs = Place(NEW_W0, 0), Place(W1, 1)
    return Pipeline(2, stage_mesh, stage_programs, transfers, inputs, outputs, frozenset(donated))


def emitted(pipeline: Pipeline, name: str = "1f1b") -> PipelinePrograms:
    schedule = make_schedule(
        name, pipeline.num_stages, pipeline.num_micro_batches, stage_mesh=pipeline.stage_mesh
    )
    programs = emit_programs(pipeline, schedule)
    check_programs(pipeline, programs)
    return programs


def written(pipeline: Pipeline, programs: PipelinePrograms, mesh: int) -> list[str]:
    """A mesh's list in words: `run` with the stage program, and names of values with their
    micro-batch."""
    program = programs.meshes[mesh]
    slots = buffer_slots(pipeline, program)

    def named(buffers: tuple[int, ...]) -> str:
        refs = [slots[buffer].ref for buffer in buffers]
        return " ".join(
            NAMES[ref.value] + ("" if ref.micro_batch is None else str(ref.micro_batch))
            for ref in refs
        )

    lines = []
    for instruction in program.instructions:
        match instruction:
            case Run():
                reads, writes = named(instruction.reads), named(instruction.writes)
                lines.append(f"run {instruction.stage_program}: {reads} -> {writes}")
            case Send():
                lines.append(f"send {named(instruction.buffers)}")
            case Recv():
                lines.append(f"recv {named(instruction.buffers)}")
            case Free():
                lines.append(f"free {named(instruction.buffers)}")
    return lines


def test_lists_of_two_stages():
    pipeline = two_stages()
    programs = emitted(pipeline)
    assert written(pipeline, programs, 0) == [
        "run 0: BATCH -> X0 X1 G0",
        "run 2: W0 X0 -> H0",
        "send H0",
        "free H0",
        "run 2: W0 X1 -> H1",
        "send H1",
        "free H1",
        "recv DH0",
        "run 4: X0 DH0 G0 -> G0",
        "free X0 DH0",
        "recv DH1",
        "run 4: X1 DH1 G0 -> G0",
        "free X1 DH1",
        "recv NORM",
        "run 6: W0 G0 NORM -> NEW_W0",
        "free W0 G0 NORM",
    ]
    assert written(pipeline, programs, 1) == [
        "run 1:  -> G1",
        "recv H0",
        "run 3: W1 H0 G1 -> DH0 G1",
        "free H0",
        "send DH0",
        "free DH0",
        "recv H1",
        "run 3: W1 H1 G1 -> DH1 G1",
        "free H1",
        "send DH1",
        "free DH1",
        "run 5: G1 -> NORM",
        "free G1",
        "send NORM",
        "free NORM",
    ]
    assert programs.meshes[0].inputs == ((0, 0), (2, 1))
    assert [position for position, _ in programs.meshes[1].outputs] == [1]


def test_what_a_stage_program_may_use_up():
    programs = emitted(two_stages())
    assert programs.donated == (
        (),  # the batch is the caller's
        (),
        (),  # w0 is read again, and so is x, by the backward pass
        (1, 2),  # h, which nobody else has, and the sum; not w1, the caller's
        (0, 1, 2),
        (0,),
        (0, 1, 2),
    )


def test_an_argument_that_is_handed_on_is_neither_used_up_nor_freed():
    pipeline = two_stages(donated=(0, 1, 2))
    programs = emitted(pipeline)
    assert programs.donated[0] == (0,)
    assert programs.donated[3] == (1, 2)
    assert not any("W1" in line for line in written(pipeline, programs, 1) if "free" in line)
    assert programs.meshes[1].outputs == ((1, programs.meshes[1].inputs[0][1]),)


def test_arguments_that_nothing_reads():
    pipeline = two_stages()
    idle = Place(98, 0), Place(99, 1)
    pipeline = replace(
        pipeline, inputs=(*pipeline.inputs, *idle), donated=frozenset([0, 3])
    )  # one donated, one the caller's
    programs = emitted(pipeline)
    first = programs.meshes[0].instructions[0]
    assert isinstance(first, Free)
    assert (3, first.buffers[0]) in programs.meshes[0].inputs


def test_eager_receives_after_the_clock_in_which_it_was_sent():
    pipeline = replace(two_stages(), num_micro_batches=3)
    parts = (Ref(X, 0), Ref(X, 1), Ref(X, 2), *once(G0))
    pipeline = replace(
        pipeline,
        stage_programs=(
            replace(pipeline.stage_programs[0], writes=parts),
            *pipeline.stage_programs[1:],
        ),
    )

    def until_first_backward(name: str) -> list[str]:
        lines = written(pipeline, emitted(pipeline, name), 0)
        kinds = ("run", "recv")
        return [" ".join(li.split()[:2]) for li in lines if li.startswith(kinds)][1:6]

    # Mesh 0 runs F0 F1 F2 B0 …; stage 1 makes dh0 in the clock of F1.
    assert until_first_backward("1f1b_eager") == [
        "run 2:", "run 2:", "recv DH0", "run 2:", "run 4:",
    ]  # fmt: skip
    assert until_first_backward("1f1b") == ["run 2:", "run 2:", "recv DH0", "run 4:", "run 2:"]


def test_stages_on_one_mesh_send_to_themselves():
    pipeline = two_stages((0, 0))
    programs = emitted(pipeline)
    (program,) = programs.meshes
    sends = [i for i in program.instructions if isinstance(i, Send)]
    recvs = [i for i in program.instructions if isinstance(i, Recv)]
    assert [send.tag for send in sends] == sorted(recv.tag for recv in recvs) == [0, 1, 2, 3, 4]
    assert all(send.to_mesh == 0 for send in sends)
    slots = buffer_slots(pipeline, program)
    assert {slots[b].stage for recv in recvs for b in recv.buffers} == {0, 1}


def test_what_is_sent_and_received_together_is_grouped():
    pipeline = two_stages()
    more = 13, 14  # two more activations, of which one is read by stage 1 only later
    stage_programs = list(pipeline.stage_programs)
    stage_programs[2] = replace(stage_programs[2], writes=each(H, *more))
    stage_programs[3] = replace(stage_programs[3], reads=(*stage_programs[3].reads, *each(13)))
    stage_programs.append(StageProgram(1, Phase.BACKWARD, each(14), ()))
    transfers = (*pipeline.transfers, *(Transfer(Ref(v, EACH), 0, 1) for v in more))
    pipeline = replace(pipeline, stage_programs=tuple(stage_programs), transfers=transfers)
    programs = emitted(pipeline)
    sends = [i for i in programs.meshes[0].instructions if isinstance(i, Send)]
    assert [(send.transfers, send.micro_batch) for send in sends] == [
        ((0, 3), 0), ((4,), 0), ((0, 3), 1), ((4,), 1),
    ]  # fmt: skip


def test_copies_that_nothing_reads_are_not_made():
    pipeline = two_stages()
    useless = Transfer(Ref(W0, None), 0, 1), Transfer(Ref(X, EACH), 0, 1)
    with_useless = replace(pipeline, transfers=(*pipeline.transfers, *useless))
    assert emitted(with_useless) == emitted(pipeline)


def test_a_copy_that_is_sent_on_or_is_a_result():
    """w0 goes from stage 0 to 1, from there to 2, which reads it, and to 3, where it is a
    result."""
    stage_programs = (StageProgram(2, Phase.FORWARD, once(W0), each(H)),)
    hops = Transfer(Ref(W0, None), 1, 2), Transfer(Ref(W0, None), 0, 1)
    pipeline = Pipeline(
        1,
        (0, 1, 2, 3),
        stage_programs,
        (*hops, Transfer(Ref(W0, None), 1, 3)),
        (Place(W0, 0),),
        (Place(W0, 3),),
        frozenset([0]),
    )
    programs = emitted(pipeline, "inference")
    assert written(pipeline, programs, 0) == ["send W0", "free W0"]
    assert written(pipeline, programs, 1) == ["recv W0", "send W0", "send W0", "free W0"]
    assert written(pipeline, programs, 2) == ["recv W0", "run 0: W0 -> H0", "free W0 H0"]
    assert written(pipeline, programs, 3) == ["recv W0"]


def test_a_sum_is_sent_when_it_is_complete():
    pipeline = two_stages()
    stage_programs = list(pipeline.stage_programs)
    stage_programs[6] = replace(
        stage_programs[6], reads=once(W0, G0, G1)
    )  # the gradient of a tied weight
    del stage_programs[5]
    transfers = (*pipeline.transfers[:2], Transfer(Ref(G1, None), 1, 0))
    pipeline = replace(pipeline, stage_programs=tuple(stage_programs), transfers=transfers)
    lines = written(pipeline, emitted(pipeline, "gpipe"), 1)
    assert [line for line in lines if "G1" in line][-2:] == ["send G1", "free G1"]
    assert lines.index("send G1") > lines.index("run 3: W1 H1 G1 -> DH1 G1")


def test_weights_follow_the_backward_pass_unless_they_have_tasks():
    stage_programs = (
        StageProgram(0, Phase.FORWARD, once(W0), each(H)),
        StageProgram(0, Phase.BACKWARD, each(H), each(DH)),
        StageProgram(0, Phase.WEIGHTS, each(H, DH), ()),
    )
    pipeline = Pipeline(2, (0,), stage_programs, (), (Place(W0, 0),), (Place(W0, 0),))

    def order(name: str) -> list[int]:
        instructions = emitted(pipeline, name).meshes[0].instructions
        return [i.stage_program for i in instructions if isinstance(i, Run)]

    assert order("gpipe") == [0, 0, 1, 2, 1, 2]
    assert order("zero_bubble") == [0, 1, 2, 0, 1, 2]


def test_updates_wait_for_other_stages_not_for_their_numbers():
    """The second part of stage 0 gives a scalar to the first part of stage 1."""
    stage_programs = (
        StageProgram(0, Phase.UPDATE, once(W0), once(20)),
        StageProgram(0, Phase.UPDATE, once(20), once(21), part=1),
        StageProgram(1, Phase.UPDATE, once(21), once(22)),
        StageProgram(0, Phase.UPDATE, once(22), once(23), part=2),
    )
    transfers = Transfer(Ref(21, None), 0, 1), Transfer(Ref(22, None), 1, 0)
    pipeline = Pipeline(1, (0, 1), stage_programs, transfers, (Place(W0, 0),), (Place(23, 0),))
    runs = [i.stage_program for i in emitted(pipeline).meshes[0].instructions if isinstance(i, Run)]
    assert runs == [0, 1, 3]


# -- pipelines that were sliced wrongly


def test_what_cannot_be_run_is_found():
    good = two_stages()
    schedule = make_schedule("1f1b", 2, 2)
    stage_programs = list(good.stage_programs)
    cyclic = [
        *stage_programs[:5],
        replace(stage_programs[5], reads=once(NEW_W0)),
        stage_programs[6],
    ]
    wrong = {
        "are read, but nothing writes them": replace(good, transfers=good.transfers[:1]),
        "is sent twice": replace(good, transfers=(*good.transfers, good.transfers[0])),
        "is there already": replace(good, transfers=(*good.transfers, Transfer(Ref(DH, 0), 0, 1))),
        "is sent, but nothing writes it": replace(
            good,
            stage_programs=(replace(stage_programs[0], reads=once(BATCH, 77)), *stage_programs[1:]),
            transfers=(*good.transfers, Transfer(Ref(77, None), 1, 0)),
        ),
        "is sent in a circle": replace(
            good,
            stage_programs=(replace(stage_programs[0], reads=once(BATCH, 77)), *stage_programs[1:]),
            transfers=(
                *good.transfers,
                Transfer(Ref(77, None), 1, 0),
                Transfer(Ref(77, None), 0, 1),
            ),
        ),
        "wait for each other": replace(
            good,
            stage_programs=tuple(cyclic),
            transfers=(*good.transfers, Transfer(Ref(NEW_W0, None), 0, 1)),
        ),
        "is read in run": replace(
            good,
            stage_programs=(
                *stage_programs[:2],
                replace(stage_programs[2], reads=(*once(W0), *each(X, DH))),
                *stage_programs[3:],
            ),
        ),
        "for other meshes": replace(good, stage_mesh=(0, 0)),
        "other micro-batches": replace(good, num_micro_batches=3),
    }
    for message, pipeline in wrong.items():
        with pytest.raises(AssertionError, match=message):
            emit_programs(pipeline, schedule)
    with pytest.raises(AssertionError, match=r"'inference' does not run stage programs \[4\]"):
        emit_programs(good, make_schedule("inference", 2, 2))


# -- what is live


def test_live_bytes():
    pipeline = two_stages()
    programs = emitted(pipeline)
    sizes = {W0: 100, BATCH: 20, X: 10, G0: 100, H: 7, DH: 7, NORM: 1, NEW_W0: 100}
    sizes |= {W1: 50, G1: 50}

    def bytes_of(stage: int, ref: Ref) -> int:
        return sizes[ref.value]

    over_time = bytes_over_time(pipeline, programs, bytes_of)
    counts = live_buffers(programs)
    assert [len(line) for line in counts] == [len(line) for line in over_time] == [16, 15]
    #  run 0, run 2, send, free, run 2
    assert over_time[0][:5] == (240, 247, 247, 240, 247)
    assert counts[0][:5] == (5, 6, 6, 5, 6)
    assert over_time[0][-2:] == (20 + 100 + 100 + 1 + 100, 20 + 100)  # the update, and the end
    assert counts[1][-1] == 1
    assert live_bytes(pipeline, programs, bytes_of) == (321, 50 + 50 + 7 + 7)


def test_1f1b_holds_less_than_gpipe():
    """Each forward pass leaves one byte to the backward pass."""
    num_stages, m = 3, 6
    stage_programs, transfers = [], []
    for stage in range(num_stages):
        came = each(100 + stage - 1) if stage else ()
        stage_programs.append(StageProgram(stage, Phase.FORWARD, came, each(stage, 100 + stage)))
        back = each(200 + stage + 1) if stage + 1 < num_stages else ()
        stage_programs.append(
            StageProgram(stage, Phase.BACKWARD, (*each(stage), *back), each(200 + stage))
        )
        if stage:
            transfers.append(Transfer(Ref(100 + stage - 1, EACH), stage - 1, stage))
            transfers.append(Transfer(Ref(200 + stage, EACH), stage, stage - 1))
    pipeline = Pipeline(
        m, tuple(range(num_stages)), tuple(stage_programs), tuple(transfers), (), ()
    )

    def residuals(stage: int, ref: Ref) -> int:
        return ref.value < num_stages

    assert live_bytes(pipeline, emitted(pipeline, "gpipe"), residuals) == (6, 6, 6)
    assert live_bytes(pipeline, emitted(pipeline, "1f1b"), residuals) == (3, 2, 1)
    assert live_bytes(pipeline, emitted(pipeline, "1f1b_eager"), residuals) == (5, 3, 1)

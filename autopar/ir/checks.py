"""The checker of pipeline programs: Pipeline, PipelinePrograms → AssertionError, or nothing.

`check_programs` runs the instruction lists of all meshes side by side, on names of buffers instead
of arrays, without knowing how the lists were made. An error is a bug of ours; it names the mesh,
the position and the instruction.
"""

from __future__ import annotations

from collections import Counter
from typing import NoReturn

from autopar.ir.pipeline import (
    EACH,
    PER_MICRO_BATCH,
    Free,
    Instruction,
    Phase,
    Pipeline,
    PipelinePrograms,
    Place,
    Recv,
    Ref,
    Run,
    Send,
    Slot,
    slots_of,
)


def check_programs(pipeline: Pipeline, programs: PipelinePrograms) -> None:
    """Every stage program runs as often as it must, on the buffers that it names; each buffer is
    written before it is read, freed once and not used afterwards; each `Send` has its `Recv`; no
    mesh waits for ever; at the end only the results and the caller's arguments are left."""
    assert len(programs.meshes) == pipeline.num_meshes, "there must be one list per mesh"
    assert len(programs.donated) == len(pipeline.stage_programs), (
        "donated must have an entry per stage program"
    )
    for kind, places in (("inputs", pipeline.inputs), ("outputs", pipeline.outputs)):
        positions = sorted(n for program in programs.meshes for n, _ in getattr(program, kind))
        assert positions == list(range(len(places))), f"{kind} at {positions}, not each once"
    every = [i for program in programs.meshes for i in program.instructions]
    tags = Counter(i.tag for i in every if isinstance(i, Send))
    assert max(tags.values(), default=1) == 1, f"tags are used twice: {tags.most_common(3)}"
    done: Counter[tuple[int, int | None]] = Counter()
    post: dict[int, tuple[int, Send]] = {}
    meshes = [_Mesh(pipeline, programs, mesh, done, post) for mesh in range(pipeline.num_meshes)]
    while any([mesh.advance() for mesh in meshes]):
        pass
    for mesh in meshes:
        mesh.check_end()
    assert not post, f"sent, but never received: {post}"
    for p in range(len(pipeline.stage_programs)):
        for key in _required_runs(pipeline, p):
            assert done[key], f"stage program {p} is never run for micro-batch {key[1]}"


def _required_runs(pipeline: Pipeline, p: int) -> list[tuple[int, int | None]]:
    if pipeline.stage_programs[p].phase in PER_MICRO_BATCH:
        return [(p, micro_batch) for micro_batch in range(pipeline.num_micro_batches)]
    return [(p, None)]


class _Mesh:
    """A mesh at some position in its list. `done`: the runs of all meshes so far. `post`: messages
    sent and not yet received, by tag, with sender and instruction."""

    def __init__(
        self,
        pipeline: Pipeline,
        programs: PipelinePrograms,
        mesh: int,
        done: Counter[tuple[int, int | None]],
        post: dict[int, tuple[int, Send]],
    ) -> None:
        self.pipeline, self.mesh = pipeline, mesh
        self.program, self.donated = programs.meshes[mesh], programs.donated
        self.done, self.post = done, post
        self.position = 0
        self.slots: dict[int, Slot] = {}  # of every buffer so far
        self.written: set[Slot] = set()
        self.gone: dict[int, str] = {}  # why a buffer may not be used any more
        self.sent: set[int] = set()
        for n, buffer in self.program.inputs:
            self._write(buffer, self._slot_of(pipeline.inputs[n]))
        self.callers = {b for n, b in self.program.inputs if n not in pipeline.donated}
        self.results = {b for _, b in self.program.outputs}

    def advance(self) -> bool:
        """Runs as far as possible; returns whether it advanced."""
        start = self.position
        while self.position < len(self.program.instructions):
            match self.program.instructions[self.position]:
                case Run() as run:
                    self._run(run)
                case Send() as send:
                    self._send(send)
                case Recv() as recv:
                    if recv.tag not in self.post:
                        break
                    self._recv(recv)
                case Free() as free:
                    self._free(free)
            self.position += 1
        return self.position > start

    def check_end(self) -> None:
        if self.position < len(self.program.instructions):
            self._fail("waits for ever")
        for n, buffer in self.program.outputs:
            slot = self._slot_of(self.pipeline.outputs[n])
            if self.slots.get(buffer) != slot or buffer in self.gone:
                self._fail(f"result {n} is not in buffer {buffer}: {self._describe(buffer)}")
        left = self.slots.keys() - self.gone.keys() - self.callers - self.results
        # Donated buffers must be freed too.
        left |= {buffer for buffer, why in self.gone.items() if why != "freed"}
        if left:
            self._fail("never freed: " + ", ".join(map(self._describe, sorted(left))))

    def _run(self, run: Run) -> None:
        stage_program = self.pipeline.stage_programs[run.stage_program]
        self._check_order(run)
        in_place = set(stage_program.reads) & set(stage_program.writes)
        if len(run.reads) != len(stage_program.reads) or len(run.writes) != len(
            stage_program.writes
        ):
            self._fail(
                f"reads {len(stage_program.reads)} and writes {len(stage_program.writes)} buffers"
            )
        donated = set(self.donated[run.stage_program])
        slots = slots_of(stage_program.stage, stage_program.reads, run.micro_batch)
        for n, (buffer, ref) in enumerate(zip(run.reads, stage_program.reads, strict=True)):
            self._read(buffer, slots[n])
            if n not in donated:
                if ref in in_place:
                    self._fail(f"{self._describe(buffer)} is updated in place, but not used up")
                continue
            if buffer in self.callers:
                self._fail(f"{self._describe(buffer)} is used up, but the caller's")
            if ref not in in_place:
                self.gone[buffer] = "used up"
            elif buffer in self.sent:
                self._fail(f"{self._describe(buffer)} was sent before it was complete")
        slots = slots_of(stage_program.stage, stage_program.writes, run.micro_batch)
        for buffer, ref, slot in zip(run.writes, stage_program.writes, slots, strict=True):
            if ref not in in_place:
                self._write(buffer, slot)
            elif self.slots.get(buffer) != slot:
                self._fail(f"{slot} is to be updated in place, not in {self._describe(buffer)}")

    def _check_order(self, run: Run) -> None:
        """A stage program runs once per micro-batch, on its mesh, after the stage programs of its
        stage that precede it."""
        stage_program = self.pipeline.stage_programs[run.stage_program]
        key = (run.stage_program, run.micro_batch)
        if self.pipeline.stage_mesh[stage_program.stage] != self.mesh:
            self._fail("the stage is on another mesh")
        if key not in _required_runs(self.pipeline, run.stage_program):
            self._fail(f"there is no micro-batch {run.micro_batch} of a {stage_program.phase}")
        if self.done[key]:
            self._fail("runs a second time")
        for p, other in enumerate(self.pipeline.stage_programs):
            if other.stage != stage_program.stage or p == run.stage_program:
                continue
            if other.phase is stage_program.phase:
                before = [(p, run.micro_batch)] if other.part < stage_program.part else []
            elif other.phase is Phase.PREPARE or stage_program.phase is Phase.UPDATE:
                before = _required_runs(self.pipeline, p)
            else:
                before = []
            for awaited in before:
                if not self.done[awaited]:
                    self._fail(f"runs before stage program {p} for micro-batch {awaited[1]}")
        self.done[key] += 1

    def _send(self, send: Send) -> None:
        if not len(send.buffers) == len(send.transfers) > 0:
            self._fail("it must have a transfer per buffer")
        for buffer, number in zip(send.buffers, send.transfers, strict=True):
            transfer = self.pipeline.transfers[number]
            if self.pipeline.stage_mesh[transfer.target] != send.to_mesh:
                self._fail(f"{transfer} is to another mesh")
            self._read(buffer, self._copied(transfer.source, transfer.ref, send.micro_batch))
        self.sent.update(send.buffers)
        self.post[send.tag] = self.mesh, send

    def _recv(self, recv: Recv) -> None:
        from_mesh, send = self.post.pop(recv.tag)
        same = (from_mesh, send.to_mesh, send.transfers, send.micro_batch)
        if same != (recv.from_mesh, self.mesh, recv.transfers, recv.micro_batch):
            self._fail(f"does not match {send} of mesh {from_mesh}")
        if len(recv.buffers) != len(recv.transfers):
            self._fail("it must have a transfer per buffer")
        for buffer, number in zip(recv.buffers, recv.transfers, strict=True):
            transfer = self.pipeline.transfers[number]
            slot = self._copied(transfer.target, transfer.ref, recv.micro_batch)
            self._write(buffer, slot)

    def _free(self, free: Free) -> None:
        for buffer in free.buffers:
            if buffer not in self.slots or self.gone.get(buffer) == "freed":
                self._fail(f"cannot free {self._describe(buffer)}")
            if buffer in self.callers or buffer in self.results:
                self._fail(f"{self._describe(buffer)} is the caller's, or a result")
            self.gone[buffer] = "freed"

    # -- buffers

    def _read(self, buffer: int, slot: Slot) -> None:
        if self.slots.get(buffer) != slot or buffer in self.gone:
            self._fail(f"needs {slot}, but has {self._describe(buffer)}")

    def _write(self, buffer: int, slot: Slot) -> None:
        if buffer in self.slots or not 0 <= buffer < self.program.num_buffers:
            self._fail(f"cannot write {slot} to {self._describe(buffer)}")
        if slot in self.written:
            self._fail(f"{slot} is written a second time")
        self.written.add(slot)
        self.slots[buffer] = slot

    def _copied(self, stage: int, ref: Ref, micro_batch: int | None) -> Slot:
        if micro_batch is None if ref.micro_batch == EACH else micro_batch != ref.micro_batch:
            self._fail(f"{ref} is not of micro-batch {micro_batch}")
        return Slot(stage, ref.of(micro_batch))

    def _slot_of(self, place: Place) -> Slot:
        return Slot(place.stage, Ref(place.value, None))

    def _describe(self, buffer: int) -> str:
        held = self.slots.get(buffer, "empty")
        return f"buffer {buffer} ({held}{', ' + self.gone[buffer] if buffer in self.gone else ''})"

    def _fail(self, message: str) -> NoReturn:
        instructions: tuple[Instruction | str, ...] = (*self.program.instructions, "the end")
        where = f"mesh {self.mesh}, instruction {self.position}, {instructions[self.position]}"
        raise AssertionError(f"{where}: {message}")

"""Progress files: what a reader finds, whenever it looks."""

import pytest

from autopar.runtime.remote.progress import _RECORD, NOWHERE, State, WorkerProgress, decode


@pytest.fixture
def progress(tmp_path):
    made = WorkerProgress(str(tmp_path / "progress"))
    yield made
    made.close()


def read(progress: WorkerProgress) -> State:
    return WorkerProgress.read(progress.path)


def test_nothing_has_begun(progress):
    assert read(progress) == State()
    assert decode(b"") == State()


def test_the_last_instruction_is_read(progress):
    progress.begin(3)
    assert read(progress).command == 3
    assert read(progress).instruction == NOWHERE
    for instruction in range(5):
        progress.at(2, instruction, 7)
        state = read(progress)
        assert (state.program, state.instruction, state.micro_batch) == (2, instruction, 7)
        assert state.command == 3
    progress.end()
    assert read(progress).command == NOWHERE
    assert read(progress).instruction == 4  # where it was last
    assert read(progress).count == 7
    assert progress.state() == read(progress)


def test_time_goes_on(progress, monkeypatch):
    monkeypatch.setattr("autopar.runtime.remote.progress.time.time", lambda: 12.5)
    progress.at(0, 0)
    assert read(progress).time_s == 12.5


@pytest.mark.parametrize("num_bytes", range(0, _RECORD.size - 4, 4))
def test_a_write_that_was_cut_short_does_not_count(progress, num_bytes):
    progress.at(1, 1, 1)
    before = bytearray(progress._map[:])
    progress.at(2, 2, 2)
    after = bytearray(progress._map[:])
    changed = next(i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b)
    start = changed // _RECORD.size * _RECORD.size
    torn = before[:]
    torn[start : start + num_bytes] = after[start : start + num_bytes]
    assert decode(bytes(torn)).instruction == 1
    assert decode(bytes(after)).instruction == 2

"""`autopar profile --model`: what it refuses, and all of it on a small step."""

import json
from pathlib import Path

import pytest

from autopar.cli import main
from autopar.cli.segments import (
    SegmentRequest,
    _Worker,
    compile_in_processes,
    parse_mesh,
    step_of,
)
from autopar.errors import ArgumentError
from autopar.ir.plan import ParallelPlan
from autopar.measure.segments.analyse import analyse
from autopar.measure.segments.files import save
from autopar.measure.segments.profile import TimingTask

FACTORY = f"{Path(__file__).parent / 'factories_for_tests.py'}:make_step"


def test_meshes_as_written():
    assert parse_mesh(None) is None
    assert parse_mesh("8") == (8,)
    assert parse_mesh("2x4") == (2, 4)
    for wrong in ("", "x", "2x", "0", "2x2x2", "two"):
        with pytest.raises(ArgumentError, match="such as 8 or 2x4"):
            parse_mesh(wrong)


def test_wrong_input_is_named(capsys, tmp_path):
    assert main(["profile", "--model", FACTORY, "--passes", "analysis,guess"]) == 2
    assert "unknown pass guess" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["profile", "--model", FACTORY, "--folder", str(tmp_path / "file")]) == 2
    assert "this is a file" in capsys.readouterr().err
    assert main(["profile", "--model", FACTORY, "--mesh", "16", "--folder", str(tmp_path)]) == 2
    assert "16" in capsys.readouterr().err
    folder = str(tmp_path / "empty")
    assert main(["profile", "--model", FACTORY, "--passes", "search", "--folder", folder]) == 2
    assert "Run the analysis pass first" in capsys.readouterr().err


@pytest.mark.ci
def test_passes_one_by_one(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "cache"))
    start = ["profile", "--model", FACTORY, "--folder", str(tmp_path), "--top", "2", "--jobs", "1"]
    assert main([*start, "--passes", "analysis"]) == 0
    assert "strategies" in capsys.readouterr().out
    assert main([*start, "--passes", "profile"]) == 0
    assert "timed in" in capsys.readouterr().out
    assert main([*start, "--passes", "search", "--check", "1"]) == 0
    out = capsys.readouterr().out
    assert "by measured times" in out
    assert out.count("(kept)") == 1
    assert ParallelPlan.load(tmp_path / "plan.json").mesh_shape == (8,)
    assert main([*start, "--passes", "search", "--set", "batch=64"]) == 2
    assert "another program" in capsys.readouterr().err


@pytest.mark.slow
def test_processes_compile_what_is_timed_here(tmp_path, monkeypatch):
    """A program compiled in another process is found in the cache."""
    request = SegmentRequest(FACTORY, {}, None, None, "cpu", None, str(tmp_path))
    step, devices = step_of(request)
    analysis = analyse(step, top=2)
    save(analysis, tmp_path / "analysis.json")
    tasks = [TimingTask(0, s, 0) for s in range(len(analysis.meshes[0].segments))]
    answers = []
    compile_in_processes(request, tasks, 1, answers.append)
    assert len(answers) == len(tasks)
    assert not any("error" in answer for answer in answers), json.dumps(answers)
    made = set((tmp_path / "compiled").iterdir())
    from autopar.measure.segments.profile import program_of_task
    from autopar.measure.segments.run import compilation_cache_in

    with compilation_cache_in(tmp_path / "compiled"):
        for task in tasks:
            program_of_task(step, analysis, task, devices).memory_bytes()
    assert set((tmp_path / "compiled").iterdir()) == made


@pytest.mark.ci
def test_a_process_that_hangs_is_ended(tmp_path):
    """The user's own file may wait forever; the program is then left to whoever times it."""
    (tmp_path / "waits.py").write_text("import time\ntime.sleep(300)\n")
    factory = f"{tmp_path / 'waits.py'}:make_step"
    with _Worker(
        SegmentRequest(factory, {}, None, None, "cpu", None, str(tmp_path)), 1.0
    ) as worker:
        assert worker.compile(TimingTask(0, 0, 0)) is None
        assert worker.process.wait(timeout=30) != 0

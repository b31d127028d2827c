"""How processes that compile end. `sys.executable` is a script here: XLA itself is slow, and is
tested in `test_gpu_compiler.py`."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from autopar.errors import CompileError
from autopar.ir.remote import ProgramSpec
from autopar.measure.verify.compile import MAX_PROCESSES, compile_all
from autopar.measure.verify.jobs import Collectives, CompileJob

RESULT = {
    "argument_bytes": 100,
    "output_bytes": 60,
    "temp_bytes": 30,
    "alias_bytes": 40,
    "collectives": [["all-gather", 2, 64.0]],
    "dot_flops": 8.0,
    "seconds": 0.5,
}


def job(name: str = "step_piece") -> CompileJob:
    return CompileJob(name, ProgramSpec("piece", 0, (), (), ()), b"", (1, 8), "")


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a shell script in the compiler's place; its `$3` is the job's folder."""

    def put(body: str) -> None:
        script = tmp_path / "python"
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))

    return put


def gives(result: dict) -> str:
    return f"cat > $3/result.json <<'END'\n{json.dumps(result)}\nEND"


def test_figures_come_back(compiler):
    compiler(gives(RESULT))
    seen: list[str] = []
    figures = compile_all([job("a"), job("b"), job("c")], 60, lambda done: seen.append(done.name))
    assert len(figures) == 3
    assert sorted(seen) == ["a", "b", "c"]
    assert figures[0].collectives == (Collectives("all-gather", 2, 64.0),)
    assert figures[0].peak_bytes == 150


def test_the_environment_is_that_of_a_machine_without_a_gpu(compiler, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setenv("PYTHONPATH", "/users/own")
    compiler(
        'found="$JAX_PLATFORMS$JAX_SKIP_CUDA_CONSTRAINTS_CHECK$CUDA_VISIBLE_DEVICES"\n'
        'test "$found" = cpu1 || exit 7\n'
        'case "$PYTHONPATH" in *:/users/own) ;; *) exit 8;; esac\n'
        'test -d "${PYTHONPATH%%:*}/autopar/measure/verify" || exit 9\n' + gives(RESULT)
    )
    assert compile_all([job()], 60)
    assert os.environ["JAX_PLATFORMS"] == "cuda"


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        ("", "--xla_gpu_enable_triton_gemm=false"),
        ("--a=1", "--a=1 --xla_gpu_enable_triton_gemm=false"),
        ("--xla_gpu_enable_triton_gemm=true", "--xla_gpu_enable_triton_gemm=true"),
    ],
)
def test_products_are_those_of_a_library_as_on_a_gpu(compiler, monkeypatch, given, flags):
    monkeypatch.setenv("XLA_FLAGS", given)
    compiler(f'test "$XLA_FLAGS" = "{flags}" || exit 7\n' + gives(RESULT))
    assert compile_all([job()], 60)


def test_at_most_two_at_a_time(compiler, tmp_path: Path):
    running = tmp_path / "running"
    running.mkdir()
    compiler(
        f"touch {running}/$$; ls {running} | wc -l >> {tmp_path}/counts; sleep 0.2; "
        f"rm {running}/$$\n" + gives(RESULT)
    )
    compile_all([job(str(i)) for i in range(5)], 60)
    counts = [int(line) for line in (tmp_path / "counts").read_text().split()]
    assert len(counts) == 5
    assert max(counts) <= MAX_PROCESSES


def test_xlas_words_are_passed_on(compiler):
    compiler(gives({"error": "JaxRuntimeError: UNIMPLEMENTED: no such instruction"}))
    with pytest.raises(CompileError, match=r"step_stage1_forward.*UNIMPLEMENTED: no such"):
        compile_all([job("step_stage1_forward")], 60)


def test_a_time_limit(compiler):
    compiler("exec sleep 30")
    started = time.monotonic()
    with pytest.raises(CompileError, match=r"step_piece within 0\.3 s.*time_limit_s"):
        compile_all([job()], 0.3)
    assert time.monotonic() - started < 20


def test_a_killed_process_is_told_from_one_that_failed(compiler):
    compiler("kill -9 $$")
    with pytest.raises(CompileError, match=r"step_piece was killed.*lack of memory"):
        compile_all([job()], 60)
    compiler("echo some words >&2; exit 3")
    with pytest.raises(CompileError, match=r"(?s)step_piece ended with status 3\..*some words"):
        compile_all([job()], 60)


def test_one_that_fails_ends_the_others(compiler):
    compiler('grep -q slow $3/job.bin && exec sleep 30\necho "no" >&2; exit 1')
    started = time.monotonic()
    with pytest.raises(CompileError, match="quick ended with status 1"):
        compile_all([job("slow"), job("quick"), job("slow too")], 60)
    assert time.monotonic() - started < 20

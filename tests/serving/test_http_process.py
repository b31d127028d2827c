"""`python -m examples.llm_serving` as a process: started, asked, told to stop."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("tokenizers")

from examples.llm_serving.__main__ import main
from examples.llm_serving.random_checkpoint import save_random_checkpoint
from tests.serving.http_clients import answer, call, events


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model") / "tiny-opt"
    save_random_checkpoint(folder, "opt", num_hidden_layers=1)
    return str(folder)


@contextmanager
def process(folder: str, *options: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """A server of its own, and its URL; it is ended at the end, if it has not ended itself."""
    command = [sys.executable, "-m", "examples.llm_serving", "--model", folder, "--port", "0"]
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    with subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, text=True, env=environment
    ) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()  # the test's own limit ends it if none comes
            found = re.search(r"http://\S+", line)
            assert found, line
            yield server, found[0]
        finally:
            if server.poll() is None:
                server.kill()
            server.wait(20)


@pytest.mark.ci
def test_a_signal_ends_it_after_what_runs(folder):
    options = ("--slots", "2", "--max-length", "256", "--drain", "60", "--mesh", "1")
    fields = {"prompt": "hello", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    with process(folder, *options, "--warm-up=") as (server, url):
        stream = events(url, **fields, return_token_ids=True)
        first = next(stream)
        assert first["model"] == "tiny-opt"
        server.send_signal(signal.SIGTERM)
        rest = list(stream)
        assert rest[-1] is None, "what ran when the signal came went on to its end"
        count = sum(len(event["choices"][0]["token_ids"]) for event in [first, *rest] if event)
        assert count == 200
        assert server.wait(30) == 0
        with pytest.raises(ConnectionError):
            call(url, "GET", "/health")


@pytest.mark.slow
def test_a_second_signal_waits_for_nobody(folder):
    with process(folder, "--warm-up=", "--drain", "600") as (server, url):
        stream = events(url, prompt="hello", max_tokens=500, ignore_eos=True)
        next(stream)
        server.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        server.send_signal(signal.SIGTERM)
        list(stream)
        assert server.wait(40) == 0


DYING_ENGINE = """
import sys
import examples.llm_serving.__main__ as server
from examples.llm_serving.requests import SamplingParams

def fail(*args, **kwargs):
    raise RuntimeError("out of memory")

def announce(args, model, port):
    model.engine._steps.prefill = fail
    model.engine.submit([1], SamplingParams())

server._announce = announce
sys.exit(server.main(sys.argv[1:]))
"""


@pytest.mark.ci
def test_it_ends_when_its_engine_dies(folder):
    """Whoever started it should start another; a server without an engine helps nobody."""
    options = ["--model", folder, "--port", "0", "--mesh", "1", "--max-length", "64", "--warm-up="]
    ended = subprocess.run(
        [sys.executable, "-c", DYING_ENGINE, *options], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 1, ended.stderr
    assert "a step failed: RuntimeError('out of memory')" in ended.stderr


@pytest.mark.slow
def test_stages_of_a_pipeline(folder, tmp_path):
    save_random_checkpoint(tmp_path / "two", "opt", num_hidden_layers=2)
    fields = {"prompt": "hello", "max_tokens": 12, "temperature": 0}
    texts = []
    for options in (["--mesh", "1"], ["--stages", "2", "--slots", "4"]):
        with process(str(tmp_path / "two"), "--max-length", "64", *options) as (_, url):
            texts.append(answer(url, **fields)["choices"][0]["text"])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "no/such/folder"], ["no/such/folder"]),
        (["--model", "FOLDER", "--mesh", "2by4"], ["--mesh", "2x4"]),
        (["--model", "FOLDER", "--mesh", "2", "--stages", "2"], ["--mesh", "--stages"]),
        (["--model", "FOLDER", "--max-length", "9999"], ["9999", "512"]),
    ],
)
def test_what_cannot_be_served_is_said(folder, capsys, options, words):
    options = [folder if option == "FOLDER" else option for option in options]
    assert main(options) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    for word in words:
        assert word in error

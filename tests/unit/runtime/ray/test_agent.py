"""What an agent knows of processes, logs and folders of its node."""

import os
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from autopar.runtime.ray.agent import NodeAgent, started


@pytest.fixture
def agent(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return NodeAgent("abcd", 3)


@pytest.fixture
def process():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield child
    child.kill()
    child.wait()


def report(agent, pid, start, logs=(), progress=""):
    known = {"pid": pid, "started": start, "logs": list(logs), "progress": progress}
    return agent.report([known])["processes"][0]


def test_a_process_runs_stops_and_ends(agent, process):
    start = started(process.pid)
    assert report(agent, process.pid, start)["state"] in tuple("RSD")
    process.send_signal(signal.SIGSTOP)
    until = time.monotonic() + 20
    while report(agent, process.pid, start)["state"] != "T":
        assert time.monotonic() < until
    assert report(agent, process.pid, start + 1)["state"] == ""  # another one with its number
    assert agent.end([(process.pid, start + 1)], 0, 1) == []
    assert report(agent, process.pid, start)["state"] == "T"
    assert agent.end([(process.pid, start)], 0, 20) == []
    assert report(agent, process.pid, start)["state"] == ""
    assert agent.end([(process.pid, start)], 0, 1) == []


def test_ends_of_logs_and_progress(agent, tmp_path):
    (tmp_path / "out").write_text("x" * 50_000 + "\nlast words\n")
    (tmp_path / "err").write_bytes(b"\xff error\n")
    (tmp_path / "progress").write_bytes(b"1234")
    said = report(
        agent,
        os.getpid(),
        0,
        [str(tmp_path / "out"), str(tmp_path / "err"), str(tmp_path / "none")],
        str(tmp_path / "progress"),
    )
    assert said["log"].endswith("\nlast words\n\ufffd error")
    assert len(said["log"]) < 25_000
    assert said["progress"] == b"1234"
    assert report(agent, os.getpid(), 0)["progress"] == b""


def test_an_agent_that_outlives_ray_says_so(agent, tmp_path):
    assert agent.report([])["ray_runs"]
    program = f"""
import os, tempfile, time
tempfile.tempdir = {str(tmp_path)!r}
from autopar.runtime.ray.agent import NodeAgent
if os.fork() == 0:
    parent, agent = os.getppid(), NodeAgent("child", 0)
    before = agent.report([])["ray_runs"]
    open({str(tmp_path / "began")!r}, "w").close()
    while os.getppid() == parent:
        time.sleep(0.01)
    print(before, agent.report([])["ray_runs"], flush=True)
else:
    while not os.path.exists({str(tmp_path / "began")!r}):
        time.sleep(0.01)
    os._exit(0)
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert said.stdout.split() == [b"True", b"False"]


def test_ports_differ(agent):
    ports = [agent.free_port() for _ in range(20)]
    assert len(set(ports)) == 20


def test_the_folder_is_private_and_goes(agent, tmp_path):
    folder = tmp_path / "autopar-abcd-3"
    assert folder.stat().st_mode & 0o777 == 0o700
    agent.remove_folder()
    assert not folder.exists()
    agent.remove_folder()


def test_folders_of_the_dead_are_removed_and_no_others(agent, tmp_path):
    def folder(name, owner):
        (tmp_path / name).mkdir()
        if owner is not None:
            (tmp_path / name / "owner").write_text(owner)

    folder("autopar-1-0", "999999999 1")
    folder("autopar-2-0", f"{os.getpid()} 1")  # another process had this number
    folder("autopar-3-0", f"{os.getpid()} {started(os.getpid())}")
    folder("autopar-4-0", None)
    folder("autopar-5-0", "nonsense")
    folder("other", "999999999 1")
    (tmp_path / "autopar-link").symlink_to(tmp_path / "other")
    NodeAgent("efgh", 0)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {
        "autopar-abcd-3",
        "autopar-efgh-0",
        "autopar-3-0",
        "autopar-4-0",
        "autopar-5-0",
        "other",
        "autopar-link",
    }

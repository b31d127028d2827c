"""Which worker is named, and what is said of it."""

import itertools
from dataclasses import replace

import pytest

from autopar.errors import DataError
from autopar.runtime.ray.faults import Sighting, Trouble, cause_of, error_about
from autopar.runtime.remote.place import WorkerPlace
from autopar.runtime.remote.progress import NOWHERE, State

ENDED_BY_JAX = (
    "F0101 client.h:80] Terminating process because the JAX distributed service detected fatal "
    "errors. This most likely indicates that another task died"
)


def sighting(worker, **known):
    place = WorkerPlace(
        worker, worker % 2, 2, worker % 2, f"node{worker % 2}", (), (), "cpu", "", "", "/tmp"
    )
    return Sighting(place, worker // 2, **{"node_alive": True, "process": "S", **known})


HEALTHY = {}
DIED = {"process": "", "trouble": Trouble.DIED, "reported": 1}
DIED_UNNOTICED = {"process": ""}
ENDED = {"process": "", "trouble": Trouble.DIED, "reported": 0, "log": ENDED_BY_JAX}
ENDED_WITH_MPS = {**ENDED, "log": "F1116 CUDA_ERROR_MPS_CLIENT_TERMINATED: the MPS client has been"}
LOST_MPS = {
    "trouble": Trouble.RAISED,
    "reported": 0,
    "detail": "JaxRuntimeError: INTERNAL: CUDA_ERROR_MPS_RPC_FAILURE",
}
LOST_PEER = {
    "trouble": Trouble.RAISED,
    "reported": 0,
    "detail": "JaxRuntimeError: Gloo AllReduce failed: Connection closed by peer",
}
RAISED = {"trouble": Trouble.RAISED, "reported": 2, "detail": "ValueError: wrong"}
SILENT = {"trouble": Trouble.SILENT, "reported": 0, "seconds": 31.0}
STOPPED = {"process": "T", "seconds": 12.0}
HUNG = {"trouble": Trouble.HUNG, "reported": 0, "detail": "'step'.", "seconds": 301.0}
NODE_LOST = {"process": None, "node_alive": False}
AGENT_LOST = {"process": None, "agent_gone": "The actor died."}
KILLED_FOR_MEMORY = {
    "process": None,
    "agent_gone": "node running low on memory",
    **{k: v for k, v in DIED.items() if k != "process"},
}

# The first of each is the cause.
CASES = {
    "killed, the others were ended by JAX": (DIED, ENDED, HEALTHY),
    "killed, the others lost a peer": (DIED, LOST_PEER, LOST_PEER),
    "killed before Ray has noticed": (DIED_UNNOTICED, LOST_PEER, ENDED),
    "killed, the MPS server of its GPU ended the others": (DIED, ENDED_WITH_MPS, LOST_MPS),
    "raised, another waits": (RAISED, HEALTHY),
    "raised, another lost its connection": (RAISED, LOST_PEER),
    "silent, others hang": (SILENT, HUNG),
    "stopped, others hang": (STOPPED, HUNG, HUNG),
    "stopped, others lost a peer": (STOPPED, LOST_PEER),
    "a node is gone, others were ended": (NODE_LOST, ENDED, LOST_PEER, HEALTHY),
    "a node is gone, its workers died": (NODE_LOST, DIED),
    "all were ended by JAX": (ENDED, HEALTHY),
    "hangs": (HUNG, HEALTHY),
    "an agent was killed": (AGENT_LOST, HEALTHY, LOST_PEER),
    "a worker died, then its agent": (DIED, AGENT_LOST),
}


@pytest.mark.parametrize("known", CASES.values(), ids=CASES.keys())
def test_the_cause_is_found_wherever_it_stands(known):
    for order in itertools.permutations(range(len(known))):
        sightings = [sighting(worker, **known[i]) for worker, i in enumerate(order)]
        assert cause_of(sightings) is sightings[order.index(0)]


def test_of_several_deaths_the_first_report_counts():
    first = sighting(0, **DIED)
    second = sighting(1, **{**DIED, "reported": 0})
    assert cause_of([first, second]) is second


def test_of_those_that_hang_the_one_that_stopped_first():
    early = sighting(1, **{**HUNG, "reported": 1}, state=State(5, 1, 0, 3, 0, 10.0))
    late = sighting(0, **HUNG, state=State(9, 1, 0, 7, 0, 20.0))
    assert cause_of([late, early]) is early


def test_the_error_says_where_and_what():
    cause = sighting(
        3,
        **DIED,
        state=State(10, 4, 1, 17, 2, 5.0),
        log="\n".join([":job_id:01", *(f"line {i}" for i in range(30))]),
    )
    error = error_about(
        [sighting(2, **ENDED), cause], lambda place, state: (1, f"run {state.instruction}")
    )
    assert (error.host, error.mesh, error.stage, error.instruction) == ("node1", 1, 1, "run 17")
    assert error.log_tail.splitlines() == [f"line {i}" for i in range(10, 30)]
    lines = str(error).splitlines()
    assert lines[0].startswith("Worker 3 died")
    assert lines[1] == "  host 1 (node1), mesh 1, stage 1, at: run 17"
    assert lines[2].startswith("  worker 2 (host 0, mesh 1) ended or raised as a consequence")
    assert "autopar.run_training" in lines[3]
    assert lines[-1] == "  | line 29"


@pytest.mark.parametrize(
    ("described", "said"),
    [("run 17", "between commands; the last instruction was: run 17"), ("", "between commands")],
)
def test_between_commands(described, said):
    state = State(10, NOWHERE, 1, 17, 2, 5.0)
    error = error_about([sighting(0, **DIED, state=state)], lambda place, state: (1, described))
    assert (error.stage, error.instruction) == (1, said)


def test_transports_that_lost_their_peer_are_consequences():
    detail = "INTERNAL: -1 = recv() failed errno: 107 err: Transport endpoint is not connected"
    assert sighting(0, **{**LOST_PEER, "detail": detail}).kind() is Trouble.CONSEQUENCE


SAID = {
    "ray's memory monitor": ({**DIED, "detail": "the node was low on memory"}, "memory monitor"),
    "ray's memory monitor, of the agent too": (KILLED_FOR_MEMORY, "memory monitor"),
    "an agent": (AGENT_LOST, "lost its node's agent: The actor died"),
    "the kernel": ({**DIED, "oom_kills": 1, "rss_bytes": 2**31}, "by the kernel .* 2.0 GiB"),
    "a node": (NODE_LOST, "lost with its node"),
    "stopped": (STOPPED, "not answered for 12 s: its process is stopped"),
    "silent": (SILENT, "not answered for 31 s"),
    "silent with its node": ({**SILENT, "process": None}, "its node does not answer either"),
    "hung": (HUNG, "no progress for 301 s in 'step'"),
    "raised": (RAISED, "raised an exception in a step.*ValueError: wrong"),
    "consequences alone": (ENDED, "was ended by JAX"),
    "peers alone": (LOST_PEER, "lost a peer"),
}


@pytest.mark.parametrize(("known", "said"), SAID.values(), ids=SAID.keys())
def test_what_is_said(known, said):
    error = error_about([sighting(0, **known), sighting(1)], lambda place, state: (None, ""))
    with pytest.raises(type(error), match=f"(?s)Worker 0 .*{said}"):
        raise error


def test_a_description_that_fails_takes_nothing_else_away():
    def describe(place, state):
        raise KeyError(state.program)

    known = replace(sighting(0, **DIED), state=State(1, 0, 0, 0, 0, 0.0))
    assert "Worker 0 died" in str(error_about([known], describe))


def test_what_was_raised_is_the_cause_of_the_error():
    raised = DataError("bad batch")
    known = sighting(0, **RAISED, error=raised)
    assert error_about([known], lambda place, state: (None, "")).__cause__ is raised


def test_what_a_lost_node_was_doing_is_known_by_heartbeats():
    state = State(9, 4, 1, 7, 2, 0.0)
    error = error_about(
        [sighting(0, **NODE_LOST, state=state)], lambda place, state: (1, "running")
    )
    assert (error.stage, error.instruction) == (1, "running")
    assert "stage 1, at: running (by its last heartbeat)" in str(error)


def test_a_command_without_instructions_is_named():
    saving = sighting(0, **DIED, state=State(9, 4, NOWHERE, NOWHERE, NOWHERE, 0.0), command="save")
    error = error_about([saving], lambda place, state: (None, ""))
    assert error.instruction == "the command 'save'"
    assert "at: the command 'save'\n" in str(error)


def test_something_is_said_of_every_log():
    def said(known):
        return str(error_about([sighting(0, **known)], lambda place, state: (None, "")))

    assert "The last lines of its log:\n  | at work" in said({**DIED, "log": "at work"})
    assert "It has written nothing to its log." in said({**DIED, "log": ":job_id:1"})
    assert "Its log cannot be read." in said(NODE_LOST)

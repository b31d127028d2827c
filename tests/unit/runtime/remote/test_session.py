"""What a broken data channel is told as."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.errors import ClusterError, WorkerError
from autopar.runtime.remote.frames import DataTimeout, PeerGone
from autopar.runtime.remote.session import RemoteSession


class Cluster:
    """Notices a failure only when somebody waits for it."""

    platform = "cpu"

    def __init__(self, failure: WorkerError | None) -> None:
        self._coming, self._failure = failure, None

    def wait_for_failure(self) -> WorkerError | None:
        self._failure = self._coming
        return self._failure

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        pass


def session_on(cluster: Any) -> RemoteSession:
    return RemoteSession(cluster, "jax_transfer", lambda: None)


@pytest.mark.parametrize("error", [PeerGone("broke"), DataTimeout("silent")])
def test_a_broken_channel_is_the_worker_that_is_gone(error: Exception) -> None:
    failure = WorkerError("Worker 3 died", host="h1")
    with pytest.raises(WorkerError) as caught, session_on(Cluster(failure)).connected():
        raise error
    assert caught.value is failure and caught.value.__cause__ is error


def test_if_no_worker_is_gone_the_network_is_cut() -> None:
    """Also a `WorkerError`, so that training starts again."""
    said = r"connection to a worker is lost, though all workers answer: broke.*Check the network"
    with pytest.raises(WorkerError, match=said), session_on(Cluster(None)).connected():
        raise PeerGone("broke")


def test_or_as_the_end_of_the_session() -> None:
    session = session_on(Cluster(None))
    session.close()
    with pytest.raises(ClusterError, match="was shut down"), session.connected():
        raise PeerGone("broke")

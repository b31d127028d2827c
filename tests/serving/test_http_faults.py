"""Bad clients and bad times: whatever comes, the server answers or closes, and serves the next."""

import concurrent.futures
import gc
import json
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("tokenizers")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from examples.llm_serving.engine import BatchingEngine
from tests.serving.http_clients import (
    address,
    answer,
    call,
    complete,
    events,
    open_stream,
    raw,
    wait_until,
)
from tests.serving.http_model import make_engine, served

pytestmark = pytest.mark.ci  # test_http stands for the server

LIMITS = {"max_body_bytes": 20_000, "max_connections": 40, "read_s": 1.0, "write_s": 1.0}
LONG = 3000  # tokens: no test waits for so many


@pytest.fixture(scope="module")
def engine() -> Iterator[object]:
    engine = make_engine(slots=2, max_queue=3, max_length=LONG + 100)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def server(engine) -> Iterator[tuple]:
    with served(engine, limits=LIMITS) as (url, server):
        yield url, server


@pytest.fixture
def url(engine, server) -> Iterator[str]:
    """The server's, which must be as it was after each test: idle, healthy, nothing held."""
    url, state = server
    assert answer(url, prompt=[1], max_tokens=2)["usage"]["completion_tokens"] == 2
    yield url
    wait_until(lambda: not any(busy(engine)), f"places freed {engine.stats()}")
    wait_until(lambda: state.num_active == 0, "no request under way")
    assert answer(url, prompt=[1], max_tokens=2)["usage"]["completion_tokens"] == 2
    assert call(url, "GET", "/health")[0] == 200
    assert not state.counts["responses_500"]


def busy(engine) -> tuple[float, float]:
    stats = engine.stats()
    return stats["requests_running"], stats["requests_waiting"]


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
LAST = HEAD + b"Connection: close\r\n"


@pytest.mark.parametrize(
    "data",
    [
        b"GARBAGE\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nNo colon\r\n\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 1000 + b"\r\n",
        HEAD + b"Content-Length: -5\r\n\r\n",
        HEAD + b"Content-Length: five\r\n\r\n",
        HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        LAST + b"Content-Length: 2\r\nContent-Encoding: gzip\r\n\r\n{}",
        LAST + b"Expect: nonsense\r\nContent-Length: 2\r\n\r\n{}",
        LAST + b"Content-Length: 0\r\n\r\n",
        b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n" * 200 + LAST + b"Content-Length: 0\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused(url, data):
    received = raw(url, data)
    for line in received.split(b"\r\n"):
        if line.startswith(b"HTTP/1."):
            assert 400 <= int(line.split()[1]) < 500, received[:300]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe\x00",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": ' + b"[" * 9000 + b"]" * 9000 + b"}",
        b'{"prompt": "' + b"\\ud83d" * 3 + b'"}',
        b'{"prompt": [1.5]}',
    ],
)
def test_malformed_bodies_are_400(url, body):
    status, _, received = call(url, "POST", "/v1/completions", body)
    assert status == 400
    error = json.loads(received)["error"]
    assert error["type"] == "invalid_request_error" and error["message"]


NAMES = ["prompt", "max_tokens", "temperature", "top_p", "top_k", "n", "stream", "stop", "echo"]
NAMES += ["logprobs", "seed", "model", "stream_options", "user", "logit_bias", "best_of", "x"]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.integers()
    | st.floats()
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4), VALUES, st.booleans())
def test_any_json_is_answered(url, fields, prompt, with_prompt):
    if with_prompt:
        fields = {"prompt": [1, 2], **fields} if prompt is None else {**fields, "prompt": prompt}
    if isinstance(fields.get("max_tokens"), int):
        fields["max_tokens"] = min(fields["max_tokens"], 20)
    status, _, body = call(url, "POST", "/v1/completions", json.dumps(fields).encode())
    assert status in (200, 400, 404), body
    if status != 200:
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


def test_a_body_over_the_limit_is_413(url):
    body = json.dumps({"prompt": "a" * 30_000}).encode()
    status, _, received = call(url, "POST", "/v1/completions", body)
    assert status == 413 and b"20000 bytes" in received
    chunk = b"1000\r\n" + b"a" * 0x1000 + b"\r\n"
    endless = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 100
    assert raw(url, endless).startswith(b"HTTP/1.1 413")


def test_a_body_that_does_not_come_is_given_up(url):
    started = time.monotonic()
    received = raw(url, HEAD + b"Content-Length: 100\r\n\r\n{")
    assert received.startswith(b"HTTP/1.1 408"), received
    assert raw(url, b"POST /v1/comp") == b""
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_place(engine, url, stream):
    tokens_before = engine.stats()["tokens"]
    body = json.dumps({"prompt": [1], "max_tokens": LONG, "stream": stream}).encode()
    with socket.create_connection(address(url), timeout=20) as connection:
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: busy(engine)[0] == 1, "the request runs")
        if stream:
            assert connection.recv(1)
    wait_until(lambda: busy(engine) == (0, 0), "the place is free")
    assert engine.stats()["tokens"] - tokens_before < LONG


def test_a_client_that_leaves_while_it_waits_is_forgotten(engine, url):
    running = [open_stream(url, prompt=[1], max_tokens=LONG) for _ in range(2)]
    wait_until(lambda: busy(engine)[0] == 2, "two run")
    waiting = [open_stream(url, prompt=[1], max_tokens=LONG) for _ in range(3)]
    wait_until(lambda: busy(engine) == (2, 3), "three wait")
    for connection in waiting + running:
        connection.close()


def test_a_full_queue_is_429_until_there_is_room(engine, url):
    held = [open_stream(url, prompt=[1], max_tokens=LONG) for _ in range(2)]
    wait_until(lambda: busy(engine)[0] == 2, "two run")
    held += [open_stream(url, prompt=[1], max_tokens=LONG) for _ in range(3)]
    wait_until(lambda: busy(engine) == (2, 3), "three wait")
    body = json.dumps({"prompt": [1], "max_tokens": 1}).encode()
    status, headers, received = call(url, "POST", "/v1/completions", body)
    assert status == 429 and int(headers["Retry-After"]) >= 1
    assert json.loads(received)["error"]["type"] == "rate_limit_error"
    for connection in held:
        connection.close()
    wait_until(lambda: busy(engine) == (0, 0), "room again")
    assert answer(url, prompt=[1], max_tokens=1)["usage"]["completion_tokens"] == 1


def test_answers_of_one_request_are_queued_together_or_not_at_all(engine, url):
    with open_stream(url, prompt=[1], max_tokens=LONG):
        wait_until(lambda: busy(engine)[0] == 1, "one runs")
        status, _ = complete(url, prompt=[1], n=9, max_tokens=LONG)
        assert status == 429
        wait_until(lambda: busy(engine) == (1, 0), "none of the nine is left")


@pytest.mark.parametrize("stream", [True, False])
def test_a_reader_that_does_not_read_is_cut_off(server, url, stream):
    state = server[1]
    before = state.counts["slow_readers"]
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect(address(url))
        fields = {"prompt": [1], "n": 2, "max_tokens": LONG, "stream": stream, "logprobs": 0}
        body = json.dumps({**fields, "temperature": 0, "return_token_ids": True}).encode()
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: state.counts["slow_readers"] > before, "it is given up", 60.0)


def test_too_many_connections_are_refused(url):
    held = [socket.create_connection(address(url), timeout=5) for _ in range(50)]
    try:
        received = b""
        for connection in held:
            connection.settimeout(0.2)
            try:
                received += connection.recv(1000)
            except TimeoutError:
                continue
        assert b"503" in received and b"too_many_connections" in received
    finally:
        for connection in held:
            connection.close()
    wait_until(lambda: call(url, "GET", "/health")[0] == 200, "room again")


def test_nothing_leaks(engine, server, url):
    def held() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    def one(index: int) -> None:
        if index % 3 == 0:
            complete(url, prompt=[1], max_tokens=5)
        elif index % 3 == 1:
            raw(url, b"nonsense\r\n\r\n")
        else:
            open_stream(url, prompt=[1], max_tokens=LONG).close()

    def storm() -> None:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(one, range(48)))
        wait_until(lambda: not any(busy(engine)) and server[1].num_active == 0, "idle")

    storm()
    wait_until(lambda: _open(url) == 1, "only ours is open")
    before = held()
    storm()
    wait_until(lambda: _open(url) == 1, "only ours is open")
    wait_until(lambda: held() <= before, f"descriptors and threads as before: {before}")


def _open(url: str) -> float:
    lines = call(url, "GET", "/metrics")[2].decode().splitlines()
    return float(
        dict(line.split() for line in lines if line[0] != "#")["llm_serving_connections_open"]
    )


def test_a_request_that_takes_too_long_is_ended(engine):
    with served(engine, limits={"request_s": 0.2}) as (url, _):
        status, body = complete(url, prompt=[1], max_tokens=LONG)
        assert status == 504 and body["error"]["code"] == "timeout"
        *_, last = events(url, prompt=[1], max_tokens=LONG)
        assert last["error"]["code"] == "timeout"
        wait_until(lambda: busy(engine) == (0, 0), "its place is free")


def test_stopping_ends_what_runs_after_a_while(engine):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with served(engine, limits={"drain_s": 0.3}) as (url, _):
            stream = events(url, prompt=[1], max_tokens=LONG)
            assert next(stream)["choices"]
            rest = pool.submit(list, stream)
        last = rest.result(20)[-1]
    assert "stopping" in last["error"]["message"]
    wait_until(lambda: busy(engine) == (0, 0), "its place is free")


def test_an_engine_that_fails_is_503(engine, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("out of memory")

    failing = BatchingEngine(engine._steps, engine._params)  # nothing is compiled again
    try:
        with served(failing) as (url, _):
            stream = events(url, prompt=[1], max_tokens=LONG)
            assert next(stream)["choices"]
            monkeypatch.setattr(failing._steps, "decode", fail)
            *_, last = stream
            assert last["error"]["code"] == "engine_stopped"
            status, body = complete(url, prompt=[1])
            assert status == 503 and body["error"]["code"] == "engine_stopped"
            assert call(url, "GET", "/health")[0] == 503
    finally:
        failing.close()

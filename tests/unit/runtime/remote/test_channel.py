import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

from autopar.errors import DataError
from autopar.runtime.remote import frames
from autopar.runtime.remote.channel import ChannelClient, ChannelServer
from autopar.runtime.remote.frames import DataTimeout, PeerGone, read_frame
from autopar.runtime.remote.sockets import greet_client

TOKEN = "a session's secret"
SOON_S = 5.0


@pytest.fixture
def server():
    server = ChannelServer("127.0.0.1", TOKEN)
    yield server
    server.close()


@pytest.fixture
def client(server):
    client = ChannelClient(server.address, TOKEN, SOON_S)
    yield client
    client.close()


def assert_same(got, sent):
    assert len(got) == len(sent)
    for one, other in zip(got, sent, strict=True):
        other = np.asarray(other)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes()


BIG = np.arange(3_000_000, dtype=np.int64)
ARRAYS = {
    "nothing": [],
    "one": [np.arange(12.0).reshape(3, 4)],
    "0-d": [np.float32(3), np.array(True)],
    "zero size": [np.zeros((0, 5)), np.zeros((3, 0), np.int8), np.ones(2)],
    "bool, complex": [np.array([True, False]), np.array([1 + 2j], np.complex64)],
    "of ml_dtypes": [
        np.arange(7).astype(d)
        for d in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
    ]
    + [np.arange(7).astype(ml_dtypes.int4)],
    "large": [np.ones(3, np.int8), BIG, BIG[:100_000].astype(ml_dtypes.bfloat16), np.ones(5)],
    "not contiguous": [BIG[:30_000].reshape(100, 300).T, BIG[::2], np.ones((4, 6))[:, ::3]],
    "lists and numbers": [[1, 2, 3], 4.0],
    "thousands": [np.full(i % 7, i, np.float32) for i in range(3000)],
}


@pytest.mark.parametrize("arrays", ARRAYS.values(), ids=ARRAYS.keys())
def test_arrays_arrive_as_they_were_sent(server, client, arrays):
    client.send(1, arrays)
    assert_same(server.take(1, SOON_S), arrays)
    server.offer(2, arrays)
    assert_same(client.receive(2, SOON_S), arrays)


def test_other_byte_orders_arrive_as_native_numbers(server, client):
    client.send(1, [np.array([1, 2, 3], ">i4")])
    (got,) = server.take(1, SOON_S)
    assert got.dtype == np.int32 and got.tolist() == [1, 2, 3]


def test_what_arrives_is_the_receivers_own_and_aligned(server, client):
    client.send(1, [BIG, BIG])
    one, other = server.take(1, SOON_S)
    one[:] = 0
    assert other[-1] == BIG[-1] and one.ctypes.data % 64 == 0


@pytest.mark.parametrize("wrong", [np.array(["a"]), np.array([None]), np.zeros(1, "M8[s]")])
def test_what_is_no_array_of_numbers_is_refused_and_nothing_is_lost(server, client, wrong):
    with pytest.raises(DataError, match="array 1 of the message has dtype"):
        client.send(1, [np.ones(3), wrong])
    client.send(1, [np.ones(3)])
    assert_same(server.take(1, SOON_S), [np.ones(3)])
    server.offer(2, [wrong])
    with pytest.raises(DataError, match="cannot send a value: array 0"):
        client.receive(2, SOON_S)
    server.offer(2, [np.ones(2)])
    assert_same(client.receive(2, SOON_S), [np.ones(2)])


def test_structured_types_are_refused(client):
    with pytest.raises(DataError, match="arrays of numbers"):
        client.send(1, [np.zeros(2, [("a", "i4")])])


def test_many_threads_send_and_receive_at_once(server, client):
    def there_and_back(key):
        sent = [np.full(key * 997, key, np.int32), np.ones(key % 5)]
        client.send(key, sent)
        server.offer(1000 + key, server.take(key, SOON_S))
        return client.receive(1000 + key, SOON_S), sent

    with ThreadPoolExecutor(8) as pool:
        for got, sent in pool.map(there_and_back, range(80)):
            assert_same(got, sent)


def test_values_can_be_asked_for_before_they_are_offered_in_any_order(server, client):
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(client.receive, key, SOON_S) for key in (1, 2, 3)]
        time.sleep(0.05)
        for key in (3, 1, 2):
            server.offer(key, [np.array(key)])
        assert [f.result()[0].item() for f in futures] == [1, 2, 3]


def test_what_comes_twice_under_a_key_keeps_its_order(server, client):
    for value in range(3):
        client.send(5, [np.array(value)])
        server.offer(5, [np.array(value)])
    assert [server.take(5, SOON_S)[0].item() for _ in range(3)] == [0, 1, 2]
    assert [client.receive(5, SOON_S)[0].item() for _ in range(3)] == [0, 1, 2]


def test_a_value_is_fetched_while_a_batch_is_on_its_way(server, client):
    server.offer(2, [np.ones(3)])
    with client._sending:  # as long as a send lasts
        assert_same(client.receive(2, SOON_S), [np.ones(3)])


def test_waits_end_at_their_limits(server, client):
    with pytest.raises(DataTimeout, match=r"key 7 .*within 0.05 s"):
        server.take(7, 0.05)
    with pytest.raises(TimeoutError, match=r"value of key 8 within 0.05 s"):
        client.receive(8, 0.05)
    server.offer(8, [np.ones(2)])
    assert_same(client.receive(8, SOON_S), [np.ones(2)])


def test_a_worker_that_takes_nothing_is_given_up():
    listener = socket.create_server(("127.0.0.1", 0))
    deaf = []

    def greet():
        for _ in range(2):
            connection, _ = listener.accept()
            greet_client(connection, TOKEN)
            deaf.append(connection)

    greeter = threading.Thread(target=greet)
    greeter.start()
    client = ChannelClient(listener.getsockname()[:2], TOKEN, 0.3)
    try:
        with pytest.raises(DataTimeout, match=r"accepted no data for 0.3 s"):
            client.send(1, [np.zeros(2**26, np.uint8)])
        with pytest.raises(PeerGone):
            client.send(2, [np.zeros(1)])
    finally:
        greeter.join(SOON_S)
        client.close()
        for connection in (listener, *deaf):
            connection.close()


def test_a_closed_server_ends_waiting_clients_and_its_own_takes(server, client):
    with ThreadPoolExecutor(2) as pool:
        receiving = pool.submit(client.receive, 1, 60)
        taking = pool.submit(server.take, 1, 60)
        time.sleep(0.05)
        started = time.monotonic()
        server.close()
        with pytest.raises(PeerGone, match=r"data channel .* is lost"):
            receiving.result(SOON_S)
        with pytest.raises(ConnectionError, match="closed"):
            taking.result(SOON_S)
        assert time.monotonic() - started < SOON_S
    with pytest.raises(PeerGone):
        client.send(1, [np.ones(3)])


def test_a_client_that_leaves_ends_the_servers_takes_and_another_may_come(server, client):
    client.send(1, [np.ones(1)])
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(server.take, 2, 60)
        time.sleep(0.05)
        client.close()
        with pytest.raises(PeerGone, match=r"key 2 will not come"):
            taking.result(SOON_S)
    assert_same(server.take(1, SOON_S), [np.ones(1)])
    again = ChannelClient(server.address, TOKEN, SOON_S)
    again.send(2, [np.ones(2)])
    assert_same(server.take(2, SOON_S), [np.ones(2)])
    again.close()


def test_closing_ends_all_threads_and_wakes_own_waiters():
    before = threading.active_count()
    server = ChannelServer("127.0.0.1", TOKEN)
    client = ChannelClient(server.address, TOKEN, SOON_S)
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(client.receive, 1, 60)
        time.sleep(0.05)
        client.close()
        client.close()
        with pytest.raises(PeerGone, match="closed here"):
            receiving.result(SOON_S)
    server.close()
    server.close()
    deadline = time.monotonic() + SOON_S
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_a_worker_process_that_is_killed_is_noticed_at_once():
    code = (
        "import sys, time\n"
        "from autopar.runtime.remote.channel import ChannelServer\n"
        f"server = ChannelServer('127.0.0.1', {TOKEN!r})\n"
        "print(server.address[1], flush=True)\n"
        "time.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        client = ChannelClient(("127.0.0.1", int(process.stdout.readline())), TOKEN, SOON_S)
        with ThreadPoolExecutor(1) as pool:
            receiving = pool.submit(client.receive, 1, 60)
            time.sleep(0.05)
            process.kill()
            with pytest.raises(PeerGone, match="process may have ended"):
                receiving.result(SOON_S)
        with pytest.raises(PeerGone):
            client.send(1, [np.ones(3)])
        client.close()


def test_another_token_is_refused_on_both_sides(server):
    with pytest.raises(DataError, match="did not accept this session"):
        ChannelClient(server.address, "another", SOON_S)
    impostor = ChannelServer("127.0.0.1", "another")
    with pytest.raises(DataError, match="did not accept this session"):
        ChannelClient(impostor.address, TOKEN, SOON_S)
    impostor.close()


def test_a_server_that_only_repeats_our_proof_is_refused():
    """One that answers the hello with the hello's own proof does not know the token."""
    listener = socket.create_server(("127.0.0.1", 0))

    def mirror():
        connection, _ = listener.accept()
        with connection:
            frames.write_frame(connection, {"kind": "challenge", "nonce": "x"})
            hello, _ = read_frame(connection)
            frames.write_frame(connection, {"kind": "welcome", "proof": hello["proof"]})

    thread = threading.Thread(target=mirror)
    thread.start()
    with pytest.raises(DataError, match="another session"):
        ChannelClient(listener.getsockname()[:2], TOKEN, SOON_S)
    thread.join(SOON_S)
    listener.close()


def test_nobody_there_is_said(server):
    server.close()
    with pytest.raises(PeerGone, match="No connection to the worker's data channel"):
        ChannelClient(server.address, TOKEN, 1.0)
    with pytest.raises(DataError, match=r"cannot listen on '192\.0\.2\.1'"):
        ChannelServer("192.0.2.1", TOKEN)


def frame(header, payload=b"", magic=b"apf1", announced=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    total = len(payload) if announced is None else announced
    return struct.pack("<4sIQ", magic, len(text), total) + text + payload


def send_of(arrays, payload=b"", announced=None):
    return frame({"kind": "send", "key": 1, "arrays": arrays}, payload, announced=announced)


FOREIGN = {
    "text": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "another magic": frame({"kind": "hello", "arrays": []}, magic=b"apf0"),
    "endless header": struct.pack("<4sIQ", b"apf1", 2**32 - 1, 0),
    "arrays before the greeting": send_of([["uint8", [2**40]]], announced=2**40),
    "no proof": frame({"kind": "hello", "arrays": []}),
    "not JSON": frame(b"{" * 100),
}


@pytest.mark.parametrize("message", FOREIGN.values(), ids=FOREIGN.keys())
def test_strangers_are_shut_out_and_harm_nobody(server, client, message):
    with socket.create_connection(server.address, timeout=SOON_S) as stranger:
        read_frame(stranger)  # the challenge
        stranger.sendall(message)
        assert_closed(stranger)
    client.send(1, [np.ones(3)])
    assert_same(server.take(1, SOON_S), [np.ones(3)])


MALFORMED = {
    "no JSON": frame(b"\xff\xfe"),
    "deep JSON": frame(b"[" * 100_000),
    "a list": frame([1]),
    "no arrays": frame({"kind": "send", "key": 1}),
    "no key": frame({"kind": "send", "arrays": []}),
    "a key that is no number": frame({"kind": "send", "key": "a", "arrays": []}),
    "unknown kind": frame({"kind": "run", "key": 1, "arrays": []}),
    "objects": send_of([["object", [1]]], b"12345678"),
    "unknown dtype": send_of([["float1024", [1]]], b"1234"),
    "void": send_of([["void32", [1]]], b"1234"),
    "a function of ml_dtypes": send_of([["finfo", [1]]], b"1234"),
    "negative size": send_of([["uint8", [-1]]], b""),
    "fractional size": send_of([["uint8", [1.5]]], b"1"),
    "a rank too high": send_of([["uint8", [1] * 65]], b"1"),
    "fewer bytes": send_of([["uint8", [5]]], b"123"),
    "more bytes": send_of([["uint8", [1]]], b"123"),
    "no memory": send_of([["uint8", [2**61]]], announced=2**61),
    "an array too large to count": send_of([["int64", [2**61, 4]]], announced=2**66 % 2**64),
}


@pytest.mark.parametrize("message", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_frames_end_their_connection_only(server, client, message):
    broken = ChannelClient(server.address, TOKEN, SOON_S)
    broken._up.sendall(message)
    assert_closed(broken._up)
    broken.close()
    client.send(1, [np.ones(3)])
    assert_same(server.take(1, SOON_S), [np.ones(3)])


def test_a_frame_that_stops_in_the_middle_is_dropped(server, client):
    broken = ChannelClient(server.address, TOKEN, SOON_S)
    broken._up.sendall(send_of([["uint8", [1000]]], b"123", announced=1000))
    broken.close()
    with pytest.raises(DataTimeout):
        server.take(1, 0.1)


def test_a_header_too_large_is_refused_before_it_leaves(server, client, monkeypatch):
    monkeypatch.setattr(frames, "MAX_HEADER_BYTES", 200)
    with pytest.raises(DataError, match="fewer, larger ones"):
        client.send(1, [np.ones(1)] * 50)
    client.send(1, [np.ones(1)])
    assert_same(server.take(1, SOON_S), [np.ones(1)])


def test_small_arrays_share_a_buffer():
    arrays = [np.ones(4)] * 1000 + [BIG] + [np.ones(4)] * 1000
    assert len(frames._joined(b"head", arrays)) == 3


def test_more_buffers_than_the_kernel_takes_at_once(server, client):
    arrays = [np.full(5000, i, np.float64) for i in range(1500)]
    client.send(1, arrays)
    assert_same(server.take(1, SOON_S), arrays)


def assert_closed(connection):
    connection.settimeout(SOON_S)
    with contextlib.suppress(ConnectionResetError):
        assert connection.recv(1) == b""


def test_values_that_nobody_will_receive_leave_the_worker(server, client):
    server.offer(1, [np.ones(3)])
    client.discard(1)
    client.discard(2)  # it is offered later
    server.offer(2, [np.ones(3)])
    server.offer(3, [np.full(3, 3.0)])
    assert_same(client.receive(3, 10), [np.full(3, 3.0)])
    until_s = time.monotonic() + 10
    while server._outbox or client._unwanted:
        assert time.monotonic() < until_s, server._outbox
        time.sleep(0.01)
    assert not client._come

"""The HTTP API: what is asked and what comes back, with a real server and a real tiny model."""

import concurrent.futures
import json
from collections.abc import Iterator

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("tokenizers")

from examples.llm_serving.requests import SamplingParams
from examples.llm_serving.server import Server
from tests.serving.http_clients import answer, call, complete, events
from tests.serving.http_model import VOCAB_SIZE, make_engine, served

PROMPT = "the answer is größer"


@pytest.fixture(scope="module")
def engine() -> Iterator[object]:
    engine = make_engine(slots=4, max_queue=200, max_length=64)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def url(engine) -> Iterator[str]:
    with served(engine) as (url, _):
        yield url


def text_of(stream: list) -> str:
    assert stream[-1] is None
    return "".join(event["choices"][0]["text"] for event in stream if event and event["choices"])


def engine_tokens(engine, prompt: list[int], **params) -> list[int]:
    completion = engine.submit(prompt, SamplingParams(**params))
    return [token.token_id for token in completion.tokens(30.0)]


def test_tokens_are_the_engines(engine, url):
    prompt = [5, 6, 7]
    expected = engine_tokens(engine, prompt, max_new_tokens=9)
    body = answer(url, prompt=prompt, max_tokens=9, temperature=0, return_token_ids=True)
    assert body["choices"][0]["token_ids"] == expected
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["object"] == "text_completion" and body["model"] == engine.model_name
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 9, "total_tokens": 12}


@pytest.mark.representatives("settings0")
@pytest.mark.parametrize("settings", [{"temperature": 0}, {"temperature": 1.3, "seed": 5}])
def test_a_stream_equals_the_whole(url, settings):
    fields = {"prompt": PROMPT, "max_tokens": 40, **settings}
    whole = answer(url, **fields)["choices"][0]
    stream = list(events(url, **fields))
    assert text_of(stream) == whole["text"]
    assert stream[-2]["choices"][0]["finish_reason"] == whole["finish_reason"] == "length"
    assert len({event["id"] for event in stream[:-1]}) == 1


def test_prompts_in_every_form(url):
    fields = {"max_tokens": 6, "temperature": 0}
    one = answer(url, prompt=PROMPT, **fields)["choices"][0]["text"]
    both = answer(url, prompt=[PROMPT, "42"], **fields)["choices"]
    assert [choice["index"] for choice in both] == [0, 1] and both[0]["text"] == one
    ids = [5, 6]
    by_ids = answer(url, prompt=ids, **fields)["choices"][0]["text"]
    lists = answer(url, prompt=[[9], ids], **fields)["choices"]
    assert lists[1]["text"] == by_ids


def test_several_answers_to_each_prompt(url):
    fields = {"prompt": ["a", "b"], "n": 3, "max_tokens": 12, "temperature": 1.5, "seed": 3}
    choices = answer(url, **fields)["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    assert len({choice["text"] for choice in choices[:3]}) > 1
    assert [choice["text"] for choice in answer(url, **fields)["choices"]] == [
        choice["text"] for choice in choices
    ]
    streamed = dict.fromkeys(range(6), "")
    for event in events(url, **fields):
        for choice in event["choices"] if event else ():
            streamed[choice["index"]] += choice["text"]
    assert list(streamed.values()) == [choice["text"] for choice in choices]


def test_a_stop_string_ends_the_text_before_itself(url):
    fields = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    text = answer(url, **fields)["choices"][0]["text"]
    stop = text[10:13]
    cut = answer(url, **fields, stop=[stop, "never there"])["choices"][0]
    assert cut["text"] == text[: text.index(stop)] and cut["finish_reason"] == "stop"
    assert text_of(list(events(url, **fields, stop=stop))) == cut["text"]


def test_a_stop_token_is_not_shown(engine, url):
    expected = engine_tokens(engine, [5], max_new_tokens=12)
    stop = expected[4]
    count = expected.index(stop) + 1
    body = answer(
        url, prompt=[5], max_tokens=12, temperature=0, stop_token_ids=[stop], return_token_ids=True
    )
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["token_ids"] == expected[:count]
    shorter = answer(url, prompt=[5], max_tokens=count, temperature=0)["choices"][0]["text"]
    assert len(body["choices"][0]["text"]) < len(shorter)


def test_the_models_end_token_ends_unless_ignored(engine):
    expected = engine_tokens(engine, [5], max_new_tokens=12)
    count = expected.index(expected[3]) + 1
    with served(engine, eos_token_ids=[expected[3]]) as (url, _):
        ended = answer(url, prompt=[5], max_tokens=12, temperature=0)
        ignored = answer(url, prompt=[5], max_tokens=12, temperature=0, ignore_eos=True)
    assert ended["usage"]["completion_tokens"] == count
    assert ignored["usage"]["completion_tokens"] == 12


def test_echo_and_logprobs(url):
    fields = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0}
    plain = answer(url, **fields)["choices"][0]["text"]
    body = answer(url, **fields, echo=True, logprobs=1)
    choice = body["choices"][0]
    assert choice["text"] == PROMPT + plain
    logprobs = choice["logprobs"]
    num_prompt = body["usage"]["prompt_tokens"]
    assert logprobs["token_logprobs"][:num_prompt] == [None] * num_prompt
    assert len(logprobs["tokens"]) == num_prompt + 5
    for value, top in zip(
        logprobs["token_logprobs"][num_prompt:], logprobs["top_logprobs"][num_prompt:], strict=True
    ):
        assert value <= 0 and list(top.values()) == [value]
    stream = list(events(url, **fields, echo=True))
    assert text_of(stream) == PROMPT + plain


def test_usage_comes_with_the_stream_when_asked(url):
    stream = list(events(url, prompt=[1, 2], max_tokens=3, stream_options={"include_usage": True}))
    assert stream[-2]["usage"]["completion_tokens"] == 3 and stream[-2]["choices"] == []


@pytest.mark.ci
def test_the_cache_ends_an_answer(engine, url):
    prompt = [1] * (engine.max_length - 4)
    body = answer(url, prompt=prompt, max_tokens=50, temperature=0)
    assert body["usage"]["completion_tokens"] <= 5
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "status", "param", "words"),
    [
        ({}, 400, "prompt", ["string"]),
        ({"prompt": []}, 400, "prompt", ["[]"]),
        ({"prompt": [1, "a"]}, 400, "prompt", ["list"]),
        ({"prompt": [1, VOCAB_SIZE]}, 400, "prompt[1]", [str(VOCAB_SIZE - 1)]),
        ({"prompt": [[1], [-1]]}, 400, "prompt[1][0]", ["-1"]),
        ({"prompt": ""}, 400, "prompt", ["no tokens"]),
        ({"prompt": "\ud800"}, 400, "prompt", ["surrogate"]),
        ({"prompt": [1] * 64}, 400, "prompt", ["64", "63"]),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens", ["0", "at least 1"]),
        ({"prompt": "a", "max_tokens": True}, 400, "max_tokens", ["true"]),
        ({"prompt": "a", "temperature": 3}, 400, "temperature", ["3", "2.0"]),
        ({"prompt": "a", "temperature": "hot"}, 400, "temperature", ["hot", "number"]),
        ({"prompt": "a", "top_p": 0}, 400, "top_p", ["temperature"]),
        ({"prompt": "a", "n": 17}, 400, "n", ["17", "16"]),
        ({"prompt": ["a"] * 17}, 400, "prompt", ["17", "16"]),
        ({"prompt": "a", "logprobs": 5}, 400, "logprobs", ["5"]),
        ({"prompt": "a", "logprobs": 1}, 400, "logprobs", ["temperature"]),
        ({"prompt": "a", "stop": ["", "b"]}, 400, "stop", ["empty"]),
        ({"prompt": "a", "stop": ["b"] * 5}, 400, "stop", ["5", "4"]),
        ({"prompt": "a", "stream": 1}, 400, "stream", ["true or false"]),
        ({"prompt": "a", "best_of": 3}, 400, "best_of", ["n (1)"]),
        ({"prompt": "a", "suffix": "z"}, 400, "suffix", ["not supported"]),
        ({"prompt": "a", "presence_penalty": 1}, 400, "presence_penalty", ["not supported"]),
        ({"prompt": "a", "max_token": 3}, 400, "max_token", ["max_tokens?"]),
        ({"prompt": "a", "model": "gpt-9"}, 404, "model", ["gpt-9"]),
    ],
)
def test_refusals_name_the_field(url, fields, status, param, words):
    got, body = complete(url, **fields)
    assert got == status
    error = body["error"]
    assert error["param"] == param and error["type"] == "invalid_request_error"
    for word in words:
        assert word in error["message"]


@pytest.mark.ci
def test_without_a_tokenizer_token_ids_are_served(engine):
    with served(engine, with_text=False) as (url, _):
        status, body = complete(url, prompt="text")
        assert status == 400 and "tokenizer.json" in body["error"]["message"]
        status, body = complete(url, prompt=[5], stop="x")
        assert status == 400 and body["error"]["param"] == "stop"
        choice = answer(url, prompt=[5], max_tokens=4, temperature=0)["choices"][0]
        streamed = [
            token_id
            for event in events(url, prompt=[5], max_tokens=4, temperature=0)
            if event
            for token_id in event["choices"][0]["token_ids"]
        ]
    expected = engine_tokens(engine, [5], max_new_tokens=4)
    assert choice["token_ids"] == streamed == expected and choice["text"] == ""


@pytest.mark.ci
def test_other_endpoints(engine, url):
    models = json.loads(call(url, "GET", "/v1/models")[2])
    assert [model["id"] for model in models["data"]] == [engine.model_name]
    assert call(url, "GET", f"/v1/models/{engine.model_name}")[0] == 200
    assert call(url, "GET", "/v1/models/other")[0] == 404
    assert call(url, "GET", "/health")[0] == 200
    assert call(url, "GET", "/nowhere")[0] == 404
    assert call(url, "GET", "/v1/completions")[0] == 405
    before = _metric(url, "completion_tokens")
    answer(url, prompt=[1], max_tokens=7)
    assert _metric(url, "completion_tokens") == before + 7


def test_metrics_have_all_their_digits(engine, url, monkeypatch):
    monkeypatch.setattr(engine, "stats", lambda: {"tokens": 123_456_789, "seconds": 0.1})
    assert _metric(url, "engine_tokens") == 123_456_789
    assert _metric(url, "engine_seconds") == 0.1


def test_many_stop_tokens_cost_a_token_nothing(engine):
    """They are looked up, not searched: half a million took 7 ms a token from everybody."""
    (token, *_) = engine_tokens(engine, [5, 6, 7], max_new_tokens=1)
    many = (*range(1_000_000, 1_500_000), token)
    completion = engine.submit([5, 6, 7], SamplingParams(max_new_tokens=9, stop_token_ids=many))
    assert isinstance(completion.stops, frozenset)
    (last,) = completion.tokens(30.0)
    assert (last.token_id, last.finish_reason) == (token, "stop")


def _metric(url: str, name: str) -> float:
    lines = call(url, "GET", "/metrics")[2].decode().splitlines()
    return float(dict(line.split() for line in lines if line[0] != "#")[f"llm_serving_{name}"])


@pytest.mark.ci
def test_sixty_four_clients_at_once_get_what_one_gets(url):
    lengths = [1 + index % 7 for index in range(64)]

    def ask(index: int) -> str:
        fields = {"prompt": [index] * lengths[index], "max_tokens": 4 + lengths[index]}
        if index % 2:
            return text_of(list(events(url, **fields, temperature=0)))
        return answer(url, **fields, temperature=0)["choices"][0]["text"]

    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        together = list(pool.map(ask, range(64)))
    assert [ask(index) for index in range(0, 64, 9)] == together[::9]


def test_a_taken_port_is_an_error(engine, url):
    from examples.llm_serving.running import serving
    from tests.serving.http_clients import address

    with (
        pytest.raises(OSError, match="address already in use"),
        serving(Server(engine), port=address(url)[1]),
    ):
        pass


def test_an_api_key_is_needed_if_there_is_one(engine):
    with served(engine, api_key="s3cret") as (url, _):
        fields = json.dumps({"prompt": [1], "max_tokens": 2}).encode()
        for headers in ({}, {"Authorization": "Bearer s3cre"}, {"Authorization": "s3cret"}):
            status, _, body = call(url, "POST", "/v1/completions", fields, headers=headers)
            assert (status, json.loads(body)["error"]["code"]) == (401, "invalid_api_key")
        good = {"Authorization": "Bearer s3cret"}
        assert call(url, "POST", "/v1/completions", fields, headers=good)[0] == 200
        assert call(url, "GET", "/health")[0] == 200


def test_a_stuck_engine_is_not_live(engine, monkeypatch):
    with served(engine, limits={"stuck_s": 5.0}) as (url, _):
        assert call(url, "GET", "/live")[0] == call(url, "GET", "/ready")[0] == 200
        monkeypatch.setattr(type(engine), "stuck_s", 6.0)
        for path in ("/live", "/ready", "/health"):
            status, _, body = call(url, "GET", path)
            assert status == 503 and "at one step for 6 s" in json.loads(body)["reason"]


def test_latencies_are_counted(engine):
    with served(engine) as (url, _):
        before = figures(url)
        answer(url, prompt=[1], max_tokens=5, ignore_eos=True)
        after = figures(url)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    prefix = "llm_serving_"
    assert grown[f"{prefix}time_to_first_token_seconds_count"] == 1
    assert grown[f"{prefix}time_per_output_token_seconds_count"] == 4
    assert grown[f"{prefix}request_seconds_count"] == 1
    assert grown[f'{prefix}request_seconds_bucket{{le="+Inf"}}'] == 1
    assert grown[f"{prefix}request_seconds_sum"] > 0


def figures(url: str) -> dict[str, float]:
    lines = call(url, "GET", "/metrics")[2].decode().splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name: float(value) for name, value in pairs}

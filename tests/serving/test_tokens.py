"""Text from tokens as they come: whole characters only, stop strings cut off, nothing lost."""

import pytest

pytest.importorskip("tokenizers")

import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from examples.llm_serving.tokens import TextStream, Tokenizer, TokenizerError
from tests.serving.http_model import VOCAB_SIZE, make_tokenizer

TOKENIZER = Tokenizer(make_tokenizer())
PROMPT = TOKENIZER.encode("the answer is ")


def pieces(token_ids, stop=()) -> list[str]:
    stream = TextStream(TOKENIZER, PROMPT, stop)
    return [*(stream.push(token_id) for token_id in token_ids), stream.flush()]


@pytest.mark.ci
@settings(deadline=None)
@given(st.text(max_size=30))
def test_pieces_make_up_the_text(text):
    given_out = pieces(TOKENIZER.encode(text))
    assert "".join(given_out) == text
    assert not any("\ufffd" in piece for piece in given_out) or "\ufffd" in text


@settings(deadline=None)
@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=120))
def test_any_tokens_give_the_text_of_all_together(token_ids):
    assert "".join(pieces(token_ids)) == TOKENIZER.decode(token_ids)


@settings(deadline=None)
@given(st.text("ab ", max_size=20), st.lists(st.text("ab ", min_size=1, max_size=4), max_size=3))
def test_stop_strings_cut_the_text_where_the_first_begins(text, stops):
    found = [text.index(stop) for stop in stops if stop in text]
    # Which of two overlapping strings is whole first depends on tokens: the text ends before it.
    given_out = "".join(pieces(TOKENIZER.encode(text), stops))
    assert text.startswith(given_out)
    if not found:
        assert given_out == text
    else:
        assert not any(stop in given_out for stop in stops)
        assert any(text.startswith(stop, len(given_out)) for stop in stops)


def test_a_character_of_several_tokens_comes_whole():
    token_ids = TOKENIZER.encode("😀")
    assert len(token_ids) == 4
    assert pieces(token_ids) == ["", "", "", "😀", ""]


def test_a_character_that_is_never_whole_comes_at_the_end():
    assert pieces(TOKENIZER.encode("😀")[:2]) == ["", "", "\ufffd"]


def test_a_space_at_the_start_of_a_word_is_kept():
    """Tokenizers of Llama drop the space before a text's first word: an answer is not a text."""
    vocab = {"▁the": 0, "▁cat": 1, "<unk>": 2}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(backend)
    assert tokenizer.decode([1]) == "cat"
    stream = TextStream(tokenizer, [0])
    assert [stream.push(1), stream.push(0), stream.flush()] == [" cat", " the", ""]


def test_folders(tmp_path):
    assert Tokenizer.load(tmp_path) is None
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.load(tmp_path)
    assert loaded is not None and loaded.encode("größer") == TOKENIZER.encode("größer")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is not a readable tokenizer"):
        Tokenizer.load(tmp_path)

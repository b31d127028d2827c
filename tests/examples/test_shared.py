"""What the examples share: options, the data's rules, and what is printed."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

import autopar
from examples import common, data
from examples.models import bert


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--size", "huge"], r"--size: invalid choice: 'huge' \(choose from '?tiny'?, '?large'?\)"),
        (["--steps", "0"], "--steps: '0': needs a whole number ≥ 1"),
        (["--devices", "-1"], "expected one argument|needs a whole number"),
        (["--batch", "many"], "--batch: 'many': needs a whole number ≥ 1"),
        (["--cluster", "slurm"], "--cluster: invalid choice: 'slurm'"),
    ],
)
def test_wrong_options_are_named(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = common.arguments("…", sizes=["tiny", "large"], size="tiny", steps=1, batch=1)
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(given)
    assert re.search(said, capsys.readouterr().err)


def test_hosts_must_divide_devices() -> None:
    parser = common.arguments("…", steps=1, batch=1)
    given = parser.parse_args(["--cluster", "ray", "--hosts", "3", "--devices", "8"])
    with (
        pytest.raises(SystemExit, match="--devices 8: --hosts 3 must divide it"),
        common.devices(given),
    ):
        pass


def test_chains_follow_their_table() -> None:
    first, second = itertools.islice(data.token_chains(16, 200, 8), 2)
    (again,) = itertools.islice(data.token_chains(16, 200, 8, first=1), 1)
    assert (second["tokens"] == again["tokens"]).all()
    assert not (first["tokens"] == second["tokens"]).all()
    assert (first["tokens"][:, 1:] == first["targets"][:, :-1]).all()
    followers = {token: set() for token in range(16)}
    for batch in (first, second):
        for token, target in zip(batch["tokens"].flat, batch["targets"].flat, strict=True):
            followers[int(token)].add(int(target))
    assert max(map(len, followers.values())) <= data.NUM_SUCCESSORS


def test_masked_tokens_are_hidden_and_others_shown() -> None:
    batch = next(data.masked_topics(128, 64, 32, 0.15))
    hidden = batch["is_masked"] == 1
    assert (batch["tokens"][hidden] == 127).all()
    assert (batch["tokens"][~hidden] == batch["targets"][~hidden]).all()
    assert 0.1 < hidden.mean() < 0.2
    # A row has tokens of one topic: 15 of 120 at most.
    assert max(len(set(row)) for row in batch["targets"]) <= 15


def test_images_of_a_class_are_alike() -> None:
    batch = next(data.patterned_images(8, 4, 64))
    means = [batch["images"][batch["labels"] == label].mean(axis=0) for label in range(4)]
    distances = [np.linalg.norm(a - b) for a, b in itertools.combinations(means, 2)]
    noise = np.linalg.norm(batch["images"][0] - means[batch["labels"][0]])
    assert min(distances) > noise


def test_images_and_windows_depend_on_their_number_alone(tmp_path: Path) -> None:
    _, second = itertools.islice(data.patterned_images(8, 4, 16), 2)
    again = next(data.patterned_images(8, 4, 16, first=1))
    assert all((second[name] == again[name]).all() for name in second)
    text = tmp_path / "text"
    text.write_bytes(bytes(range(200)))
    _, window = itertools.islice(data.text_windows(text, 16, 8), 2)
    again = next(data.text_windows(text, 16, 8, first=1))
    assert all((window[name] == again[name]).all() for name in window)
    assert (window["targets"] == window["tokens"] + 1).all()
    with pytest.raises(ValueError, match="has 200 bytes; a window needs 201"):
        next(data.text_windows(text, 200, 8))


def test_progress_tells_first_and_last(capsys: pytest.CaptureFixture[str]) -> None:
    progress = common.Progress(3, "tokens", 10)
    for loss in (3.0, 2.0, 1.0):
        progress(np.float32(loss))
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "step 1  loss 3.0000"
    assert said[-1] == "loss 3.0000 → 1.0000 in 3 steps"
    assert re.fullmatch(r"step 3  loss 1.0000  [\d,]+ tokens/s", said[-2])


def test_a_size_that_is_not_there_is_told_with_those_that_are():
    sizes = {"tiny": bert.EXAMPLES["bert-tiny"].config}
    assert common.sized(sizes, "tiny", num_layers=3, seq_len=None).num_layers == 3
    with pytest.raises(autopar.ArgumentError, match=r"unknown size 'huge'; choose from tiny\."):
        common.sized(sizes, "huge")

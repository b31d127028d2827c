import sys
from pathlib import Path

import pytest

from autopar.cli.factories import load_object, load_step, parse_options
from autopar.errors import FactoryError

HERE = Path(__file__).parent
FILE = str(HERE / "factories_for_tests.py")


def test_a_file_and_its_options() -> None:
    found = load_step(f"{FILE}:make_step", {"batch": 8})
    assert found.args[1]["x"].shape == (8, 64)
    assert found.kwargs == {}
    assert load_step(f"{FILE}:make_with_kwargs", {}).kwargs["batch"]["x"].shape == (32, 64)


def test_a_module() -> None:
    import json

    assert load_object("json:loads") is json.loads


def test_options_are_json_or_text() -> None:
    given = ["batch=32", "rate=0.5", "size=13b", "fast=true", "sizes=[1, 2]", "name=a=b"]
    assert parse_options(given) == {
        "batch": 32, "rate": 0.5, "size": "13b", "fast": True, "sizes": [1, 2], "name": "a=b",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["batch"], "--set batch: needs NAME=VALUE"),
        (["1=2"], "needs NAME=VALUE"),
        (["batch=1", "batch=2"], "batch was set twice"),
    ],
)
def test_wrong_options(given: list[str], said: str) -> None:
    with pytest.raises(FactoryError, match=said):
        parse_options(given)


@pytest.mark.parametrize(
    ("target", "options", "said"),
    [
        ("make_step", {}, "make_step: needs FILE.py:FUNCTION or MODULE:FUNCTION"),
        ("no_such_file.py:make_step", {}, "no_such_file.py: no such file"),
        (FILE.replace("_tests", "_test") + ":f", {}, "did you mean 'factories_for_tests.py'"),
        ("no_such_module.sub:f", {}, "no module 'no_such_module' in this folder"),
        (f"{FILE}:mak_step", {}, "has no 'mak_step' .did you mean 'make_step'.*It defines"),
        (f"{FILE}:not_a_method", {}, "is 7; needs a function that returns"),
        (f"{FILE}:make_nothing", {}, "returned None; needs .step, args."),
        (f"{FILE}:make_only_a_step", {}, "returned <function .*function.; needs .step, args."),
        (f"{FILE}:make_one_argument", {}, "dict. as arguments; needs a tuple of them"),
        (f"{FILE}:make_not_callable", {}, r"returned 5 \(int\) first; needs"),
        (f"{FILE}:make_odd_kwargs", {}, r"returned \[1\] \(list\) as arguments by name"),
        (f"{FILE}:make_failing", {}, r"make_failing\(\) raised ValueError: no weights here"),
        (f"{FILE}:make_step", {"bacth": 1}, "has no option 'bacth' .did you mean 'batch'"),
        (f"{FILE}:needs", {}, "needs size. Give --set size="),
    ],
)
def test_wrong_factories(target: str, options: dict, said: str) -> None:
    with pytest.raises(FactoryError, match=said):
        load_step(target, options)


def test_a_file_that_cannot_be_imported(tmp_path) -> None:
    path = tmp_path / "broken_step.py"
    path.write_text("import no_such_package_at_all\n")
    with pytest.raises(
        FactoryError, match=r"broken_step\.py: raised ModuleNotFoundError"
    ) as caught:
        load_object(f"{path}:make_step")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


@pytest.mark.parametrize("stem", ["run_once_of_tests", "json"])
def test_a_file_is_run_once(stem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that shares its name with a module that is imported already."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / f"{stem}.py"
    path.write_text("def make_step():\n    pass\n")
    first = load_object(f"{path}:make_step")
    assert load_object(f"{path}:make_step") is first
    assert load_object(f"{path}:make_step") is first


@pytest.mark.parametrize("name", ["llama", "gpt", "moe"])
def test_the_examples_of_the_repository(name: str) -> None:
    found = load_step(f"examples.{name}:make_step", {"size": "tiny", "batch": 16})
    assert found.args[1]["tokens"].shape[0] == 16
    with pytest.raises(FactoryError, match=r"raised ArgumentError: unknown size 'huge'; .*tiny"):
        load_step(f"examples.{name}:make_step", {"size": "huge"})

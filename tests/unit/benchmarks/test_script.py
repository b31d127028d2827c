"""The options and the results file that benchmark scripts share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.script import check_names, command_line, read_rows, script_parser, write_json


def test_a_parser_has_the_first_line_and_json() -> None:
    parser = script_parser("What is measured.\n\n    python -m benchmarks.x\n")
    assert parser.description == "What is measured."
    assert parser.parse_args(["--json", "rows.json"]).json == "rows.json"
    assert parser.parse_args([]).json is None


def test_unknown_names_end_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    parser = script_parser("")
    check_names(parser, "--only", ["gpt"], ["gpt", "moe"])
    with pytest.raises(SystemExit):
        check_names(parser, "--only", ["gpt", "bert"], ["gpt", "moe"])
    assert "--only: unknown 'bert'; choose from gpt, moe" in capsys.readouterr().err


def test_command_lines_hide_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["script", "--json", "a/rows.json", "--hlo", "b", "--tiny"])
    typed = command_line("benchmarks.x", FILE="a/rows.json", FOLDER=None)
    assert typed == "python -m benchmarks.x --json FILE --hlo b --tiny"


def test_rows_are_read_back(tmp_path: Path) -> None:
    path = str(tmp_path / "rows.json")
    assert read_rows(None) is None and read_rows(path) is None
    write_json(None, {"rows": [1]})
    write_json(path, {"jax": "0.12", "rows": [{"a": 1}]})
    assert read_rows(path) == [{"a": 1}]
    assert json.loads(Path(path).read_text())["jax"] == "0.12"

"""`autopar bench` from its command line."""

import json

import pytest

from autopar.cli import bench, main


def test_rows_are_listed(capsys):
    assert main(["bench", "--only", "h100", "--list", "--models", "moe", "--devices", "8,64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["moe-10b", "moe-27b"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--list", "--models", "mole"], ["--models mole", "'moe'"]),
        (["--list", "--devices", "8,many"], ["--devices 8,many", "whole numbers"]),
        (["--show", "nowhere.json"], ["--show nowhere.json", "not readable"]),
    ],
)
def test_wrong_input_is_told(arguments, words, capsys):
    assert main(["bench", *arguments]) == 2
    told = capsys.readouterr().err
    assert all(word in told for word in words) and "Traceback" not in told


def test_tables_of_a_file_are_shown_and_put_into_a_text(tmp_path, capsys):
    results = [
        {"plan": "autopar", "family": "autopar", "fits": True, "step_ms": 9.0, "mesh": "4×2"},
        {"plan": "FSDP, remat full", "family": "FSDP", "fits": True, "step_ms": 10.0},
    ]
    row = {"model": "gpt-2.6b", "devices": 8, "batch": 64, "results": results}
    file, text = tmp_path / "suite.json", tmp_path / "page.md"
    file.write_text(json.dumps({"h100": {"rows": [row]}}))
    text.write_text("<!-- bench:h100 -->\n<!-- /bench:h100 -->\n")
    assert main(["bench", "--show", str(file), "--rewrite", str(text)]) == 0
    line = (
        "| gpt-2.6b | 8 | 64 | 9.0 ms on a 4×2 mesh | 10.0 ms, FSDP, remat full "
        "| – | 0.90 | not recorded |  |"
    )
    assert line in capsys.readouterr().out.splitlines()
    assert line in text.read_text().splitlines()


def test_an_installed_package_without_the_suite_says_how_to_get_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    installed = tmp_path / "site-packages" / "autopar" / "cli" / "bench.py"
    monkeypatch.setattr(bench, "__file__", str(installed))
    assert main(["bench", "--list"]) == 2
    told = capsys.readouterr().err
    assert "runs from a clone" in told and "git clone" in told and "examples,verify" in told

"""The gallery in the documentation is the one that its script made."""

import json

import jax
import pytest

from autopar.cli.baselines import MEGATRON, TITLES
from benchmarks import gallery
from tests.zoo.program import Size, all_programs

ROWS = json.loads(gallery.RESULTS.read_text())["rows"]


def test_every_entry_has_its_page_and_every_page_its_entry():
    names = list(gallery.entries())
    assert list(ROWS) == names
    assert sorted(path.stem for path in gallery.FOLDER.iterdir()) == sorted(names)
    for path in gallery.FOLDER.iterdir():
        assert path.stat().st_size < 2**20, f"{path.name} is large for a repository"


def test_the_list_is_that_of_the_rows():
    assert gallery.LIST.read_text() == gallery.list_text(ROWS)


def test_a_baseline_that_does_not_fit_is_said_so():
    row = next(iter(ROWS.values()))
    fits = {**row, "peak_gib": 50.0, "num_micro_batches": 4, "step_s": 0.5, "remat_layers": 3}
    large = {**row, "peak_gib": 100.0}
    refused = "split over 8 devices, the state takes 200 GiB of each, and the budget is 67 GiB"
    others = dict(zip(TITLES.values(), (fits, large, {"error": "no batch"}), strict=True))
    others[MEGATRON] = {"error": refused}
    (line,) = (
        line
        for line in gallery.list_text({"name": {**row, "others": others}}).splitlines()
        if "name.html" in line
    )
    cells = line.removesuffix(" |").split(" | ")[-4:]
    fitting = "500.00 ms, 4 micro-batches, recomputing"
    assert cells == [fitting, "does not fit", "no plan", "does not fit"]


@pytest.mark.ci
def test_a_page_is_written(tmp_path, monkeypatch):
    def make():
        step = all_programs()["mixer"].build(Size.SMALL)
        return step.step, (
            jax.eval_shape(step.make_state),
            *jax.eval_shape(lambda: step.make_batch(0)),
        )

    monkeypatch.setattr(gallery, "entries", lambda: {"mixer-8": gallery.Entry("Mixer", 8, make)})
    row = gallery.write_plan("mixer-8", tmp_path)
    assert (tmp_path / "mixer-8.html").read_text().lower().startswith("<!doctype html>")
    assert row["title"] == "Mixer" and list(row["others"]) == [*TITLES.values(), MEGATRON]
    assert gallery.list_text({"mixer-8": row}).count("mixer-8.html") == 1

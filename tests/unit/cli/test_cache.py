"""`autopar cache`: shows and removes plans, and never fails for want of a folder."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import autopar
from autopar.cli import main


def train_step(w, x):
    return w - 0.1 * (x.T @ (x @ w)), (x @ w).sum()


def test_plans_are_shown_and_removed(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))
    assert main(["cache"]) == 0
    assert "0 plans" in capsys.readouterr().out
    shapes = [jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 2
    cluster = autopar.ClusterSpec(1, 4, "h100-sxm")
    autopar.plan(train_step, *shapes, cluster=cluster, method=autopar.DataParallel())
    (tmp_path / "plans" / "foreign.json").write_text("not a plan")
    assert main(["cache"]) == 0
    shown = capsys.readouterr().out
    assert "2 plans" in shown and "train_step" in shown and "DataParallel" in shown
    assert main(["cache", "--clear"]) == 0
    assert "2 plans removed" in capsys.readouterr().out
    assert list((tmp_path / "plans").iterdir()) == []


def test_a_cache_that_is_off(monkeypatch, capsys):
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", "")
    assert main(["cache", "--clear"]) == 0
    assert "not kept" in capsys.readouterr().out

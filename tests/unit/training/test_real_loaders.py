"""Loaders of other packages go on where they were: torchdata's and grain's themselves.

    pip install -e '.[test,loaders-test]' && python -m pytest -m slow FILE

`test_elastic.py` has the same with objects of their protocols, which need no package.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import autopar
from tests.unit.training.test_elastic import WIDTH, Failing, Losses, assert_equal, fresh_state

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata's own call
]
NUM_STEPS, NUM_FIRST = 12, 6


class Rows:
    """A dataset for torch and for grain, which a worker process can read. By its `repr`, grain sees
    whether a position is of the same source."""

    def __repr__(self) -> str:
        return "Rows()"

    def __len__(self) -> int:
        return 8 * 2 * NUM_STEPS

    def __getitem__(self, index: Any) -> np.ndarray:
        return np.random.default_rng(int(index)).normal(size=WIDTH).astype(np.float32)


def torch_loader(num_workers: int) -> Any:
    torch = pytest.importorskip("torch")
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    return loaders.StatefulDataLoader(
        Rows(),
        batch_size=8,
        shuffle=True,
        collate_fn=np.stack,
        generator=torch.Generator().manual_seed(7),
        num_workers=num_workers,
        multiprocessing_context="spawn" if num_workers else None,
    )


def grain_iterator() -> Any:
    grain = pytest.importorskip("grain.python")
    return iter(grain.MapDataset.source(Rows()).shuffle(seed=7).to_iter_dataset().batch(8))


def grain_loader() -> Any:
    grain = pytest.importorskip("grain.python")
    sampler = grain.IndexSampler(
        len(Rows()), grain.NoSharding(), shuffle=True, num_epochs=1, seed=7
    )
    return iter(grain.DataLoader(data_source=Rows(), sampler=sampler, operations=[grain.Batch(8)]))


MAKE = {
    "torchdata": lambda: torch_loader(0),
    "torchdata, a worker process": lambda: torch_loader(1),
    "grain": grain_iterator,
    "grain's DataLoader": grain_loader,
}


@pytest.mark.parametrize("with_loader", [False, True], ids=["plain", "data_loader"])
@pytest.mark.parametrize("kind", MAKE)
def test_a_run_in_two_parts_sees_the_batches_of_one(
    tmp_path: Path, kind: str, with_loader: bool
) -> None:
    def run(folder: str, num_steps: int, calls: set[int]) -> Any:
        step, losses, batches = Failing(calls), Losses(), MAKE[kind]()
        state, _ = autopar.run_training(
            step,
            fresh_state(),
            autopar.data_loader(batches, step) if with_loader else batches,
            checkpoint_dir=tmp_path / folder,
            checkpoint_every=4,
            num_steps=num_steps,
            on_step=losses,
        )
        return state, losses.told

    want, losses = run("whole", NUM_STEPS, set())
    assert len({loss for _, loss in losses}) == NUM_STEPS, "batches differ"
    _, first = run("parts", NUM_FIRST, {NUM_FIRST - 1})  # a restart in the same process
    assert sorted(set(first)) == losses[:NUM_FIRST]
    state, second = run("parts", NUM_STEPS, set())  # as in the next process: a new loader
    assert second == losses[NUM_FIRST:]
    assert_equal(state, want)

"""`run_training`: a training loop that survives the loss of workers, and its own end.

Step n takes batch n, and the checkpoint `step_n` holds the state after n steps, so a checkpoint
also tells the position in the data. When a worker is lost, the loop restarts the cluster, restores
the newest checkpoint and repeats the batches since then. When training should end or the cluster
takes nodes away, it saves a checkpoint first.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from autopar.errors import ClusterError, WorkerError
from autopar.runtime.checkpoints.save import checked_directory
from autopar.training.batch_source import Batches, BatchSource, batch_source
from autopar.training.keeping import CheckpointPolicy, Keeping, NonFiniteError, check_counts
from autopar.training.loop import Training
from autopar.training.metrics import Meter, MetricsPolicy
from autopar.training.preemption import StopRequests
from autopar.training.restarts import ClusterWatch, PlannedRestart, RestartPolicy, Restarts


def run_training(
    step: Callable[..., Any],
    state: Any,
    batches: Batches,
    *,
    checkpoint_dir: str | Path,
    max_restarts: int = 3,
    restart_policy: RestartPolicy | None = None,
    checkpoint_every: int = 100,
    keep: int | None = 2,
    checkpoint_policy: CheckpointPolicy | None = None,
    on_step: Callable[[int, Any], None] | None = None,
    on_restart: Callable[[WorkerError | ClusterError], None] | None = None,
    num_steps: int | None = None,
    metrics: MetricsPolicy | None = None,
    grace_s: float = 30.0,
) -> tuple[Any, Any]:
    """Train with checkpoints, and go on when workers are lost. Returns the last state and the other
    results of the last step; a finished run's are read again if they were numbers, else None.

    step:             takes (state, batch) and returns the new state, alone or in a tuple with other
                      results: the first with the structure, shapes and types of `state`.
    state:            the initial state, which the first step uses up. If the folder has a
                      checkpoint, only its types count, and its arrays are freed.
    batches:          one per step: an iterable, a loader that saves its position, or a function
                      from the number of the first batch to an iterable (docs/training.md).
    checkpoint_dir:   the folder of checkpoints, which all hosts must see, or a URL in an object
                      store.
    max_restarts:     how many `WorkerError`s in a row to survive without a new checkpoint.
    restart_policy:   how long to wait for nodes, whether fewer will do, and more.
    checkpoint_every: steps between checkpoints, which are written in the background: what a lost
                      worker costs, and the steps run while a checkpoint is written.
    keep:             how many checkpoints to keep, the newest; None for all. The newest one after
                      which a step gave finite numbers always stays.
    checkpoint_policy: which others to keep, and what to do about bad numbers (by default, a loss
                      that is not finite raises `NonFiniteError`).
    on_step:          called with the number of steps done and the step's results beside the state
                      (one as it is, several as a tuple, or None); again for repeated steps.
    on_restart:       called with the error before each restart, also after one that failed.
    num_steps:        when to stop, counted from the very first step; None: when the batches end.
    metrics:          which figures go where, how often; default: a line in the log.
    grace_s:          after SIGTERM, Ctrl-C, or SIGUSR1 under SLURM, a checkpoint is saved within
                      this time; then `Preempted`, a `SystemExit`, is raised, or `KeyboardInterrupt`
                      after Ctrl-C. The same call in a new process goes on exactly there.
    """
    check_counts(
        "run_training",
        max_restarts=(max_restarts, 0),
        checkpoint_every=(checkpoint_every, 1),
        keep=(keep, 1),
        num_steps=(num_steps, 0),
    )
    keeping = Keeping(checkpoint_every, keep, checkpoint_policy or CheckpointPolicy())
    meter = Meter(step, metrics or MetricsPolicy())
    directory = checked_directory("run_training", checkpoint_dir)
    training = Training(step, state, directory, keeping, on_step, meter)
    requests = StopRequests(grace_s)
    restarts = Restarts(restart_policy, max_restarts, on_restart, requests.sleep, meter)
    return _train(training, state, batches, num_steps, restarts, requests)


def _train(
    training: Training,
    state: Any,
    batches: Batches,
    num_steps: int | None,
    restarts: Restarts,
    requests: StopRequests,
) -> tuple[Any, Any]:
    source = batch_source(batches, training.newest() or 0, training.may_repeat)
    try:
        with requests as stops, ClusterWatch(restarts.policy) as watch:
            return _run_with_restarts(training, state, source, num_steps, restarts, stops, watch)
    finally:
        source.close()
        training.close()


def _run_with_restarts(
    training: Training,
    state: Any,
    source: BatchSource,
    num_steps: int | None,
    restarts: Restarts,
    stops: StopRequests,
    watch: ClusterWatch,
) -> tuple[Any, Any]:
    must_restart = False

    def load_again() -> None:
        stops.take_signals()
        training.load(state, source)

    while True:
        written = training.written
        try:
            if must_restart:
                restarts.start_again(load_again)
            else:
                training.load(state, source)
            watch.watch()
            return training.run(source, num_steps, stops, watch)
        except PlannedRestart as reason:
            watch.forget()
            source.forget_all()
            restarts.planned(reason)
        except NonFiniteError as error:
            watch.forget()
            training.after_bad_numbers(error, stops)
            source.forget_all()
            must_restart = False
            continue
        except WorkerError as error:
            watch.forget()
            training.settle(stops)
            source.forget_all()
            if stops.is_asked:
                raise stops.error(training.written) from error
            restarts.after_loss(error, training.written != written)
        must_restart = True

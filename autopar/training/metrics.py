"""Figures of a training run, and where they go: a log line, Prometheus, TensorBoard, a function.

A *sink* is a function of `TrainingMetrics`; one with a `close` method is closed when training ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from autopar import session
from autopar.api import ParallelFunction
from autopar.errors import ArgumentError, ClusterError, DependencyError, WorkerError
from autopar.inspect.breakdown import rates_of
from autopar.progress import LOGGER
from autopar.training.keeping import check_counts

_ASK_LIMIT_S = 30.0


@dataclass(frozen=True)
class TrainingMetrics:
    """Figures of the steps since the last ones.

    step:             how many steps are done.
    step_s:           seconds per step, on average.
    tokens_per_s:     if `tokens_per_step` was given.
    mfu:              model FLOPs utilization, the share of the devices' peak that the model's own
                      products need; None if the step has no plan of autopar's.
    memory_bytes:     in use on the fullest device; None where JAX does not count it (CPUs).
    loss:             the first floating-point number among the results; None if there is none.
    restarts:         since `run_training` was called.
    checkpoint_step:  of the newest complete checkpoint; None if there is none.
    checkpoint_age_s: seconds since it was complete, or found.
    """

    step: int
    step_s: float
    tokens_per_s: float | None
    mfu: float | None
    memory_bytes: int | None
    loss: float | None
    restarts: int
    checkpoint_step: int | None
    checkpoint_age_s: float | None

    def text(self) -> str:
        """One line."""
        parts = [f"step {self.step}", f"{1000 * self.step_s:.1f} ms per step"]
        if self.loss is not None:
            parts.insert(1, f"loss {self.loss:.6g}")
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:.0f} tokens/s")
        if self.mfu is not None:
            parts.append(f"MFU {100 * self.mfu:.1f} %")
        if self.memory_bytes is not None:
            parts.append(f"{self.memory_bytes / 2**30:.1f} GiB in use")
        if self.restarts:
            parts.append(f"{self.restarts} restarts")
        if self.checkpoint_age_s is not None:
            parts.append(f"checkpoint {self.checkpoint_step}, {self.checkpoint_age_s:.0f} s old")
        return ", ".join(parts)


Sink = Callable[[TrainingMetrics], None]


def log_metrics(metrics: TrainingMetrics) -> None:
    """Log a line of `metrics` as INFO under "autopar". Cannot raise an `AutoparError`."""
    LOGGER.info("%s", metrics.text())


class PrometheusMetrics:
    """A sink that serves the newest figures to Prometheus, as gauges named `autopar_…`.

    port:    to listen on; 0 lets the system choose, and `.port` says which.
    address: to listen at; others than this machine need "0.0.0.0".

    `DependencyError` without the package prometheus-client.
    """

    def __init__(self, port: int, address: str = "127.0.0.1") -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise DependencyError(
                f"PrometheusMetrics needs prometheus-client, which cannot be imported ({error}). "
                "Install it: pip install prometheus-client."
            ) from error
        registry = prometheus_client.CollectorRegistry()
        self._gauges = {
            name: prometheus_client.Gauge(f"autopar_{name}", f"autopar: {name}", registry=registry)
            for name in TrainingMetrics.__dataclass_fields__
        }
        self._server, self._thread = prometheus_client.start_http_server(
            port, address, registry=registry
        )
        self.port = self._server.server_port

    def __call__(self, metrics: TrainingMetrics) -> None:
        for name, value in asdict(metrics).items():
            if value is not None:
                self._gauges[name].set(value)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_ASK_LIMIT_S)


class TensorBoardMetrics:
    """A sink that writes scalars for TensorBoard, by the package tensorboardX or, without it, clu.

    folder: where the event files go.

    `DependencyError` without one of these packages.
    """

    def __init__(self, folder: str | Path) -> None:
        self._write, self._close = _scalar_writer(str(folder))

    def __call__(self, metrics: TrainingMetrics) -> None:
        values = {n: float(v) for n, v in asdict(metrics).items() if n != "step" and v is not None}
        self._write(metrics.step, values)

    def close(self) -> None:
        """Write everything and close the file."""
        self._close()


def _scalar_writer(
    folder: str,
) -> tuple[Callable[[int, dict[str, float]], None], Callable[[], None]]:
    try:
        from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]
    except ImportError:
        return _clu_writer(folder)
    writer = SummaryWriter(folder)

    def write(step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(f"training/{name}", value, step)

    return write, writer.close


def _clu_writer(folder: str) -> tuple[Callable[[int, dict[str, float]], None], Callable[[], None]]:
    try:
        from clu import metric_writers  # pyright: ignore[reportMissingImports]

        writer = metric_writers.SummaryWriter(folder)
    except (ImportError, AttributeError) as error:
        raise DependencyError(
            f"TensorBoardMetrics needs tensorboardX or clu, and neither can be imported ({error}). "
            "Install one: pip install tensorboardX."
        ) from error

    def write(step: int, values: dict[str, float]) -> None:
        writer.write_scalars(step, {f"training/{name}": value for name, value in values.items()})

    return write, writer.close


@dataclass(frozen=True)
class MetricsPolicy:
    """Where the figures of `run_training` go.

    sinks:           functions of `TrainingMetrics`: `log_metrics`, a `PrometheusMetrics`, a
                     `TensorBoardMetrics`, or your own.
    every:           steps between two figures; training waits for a step to measure them.
    tokens_per_step: how many tokens a batch has, for tokens/s.
    """

    sinks: Sequence[Sink] = (log_metrics,)
    every: int = 50
    tokens_per_step: int | None = None

    def __post_init__(self) -> None:
        check_counts(
            "MetricsPolicy", every=(self.every, 1), tokens_per_step=(self.tokens_per_step, 1)
        )
        for sink in self.sinks:
            if not callable(sink):
                raise ArgumentError(
                    f"MetricsPolicy(sinks=[… {sink!r}]): needs functions of TrainingMetrics, such "
                    "as autopar.log_metrics, or autopar.PrometheusMetrics(port=9000)."
                )


class Meter:
    """Measures steps and hands figures to sinks, every so many steps.

    restarts: how many there were; set by whoever counts them.
    """

    def __init__(self, step: Any, policy: MetricsPolicy) -> None:
        self.restarts = 0
        self._step, self._sinks, self._every = step, tuple(policy.sinks), policy.every
        self._tokens_per_step = policy.tokens_per_step
        self._begun: tuple[int, float] | None = None
        self._checkpoint: tuple[int, float] | None = None
        self._rates: tuple[Any, Any] | None = None

    def begin(self) -> None:
        """Training has been loaded: the next step may compile, and does not count."""
        self._begun = None

    def saved(self, step: int) -> None:
        """The checkpoint of this step is complete."""
        if self._checkpoint is None or self._checkpoint[0] != step:
            self._checkpoint = step, time.monotonic()

    def done(self, step: int, loss: Callable[[], float | None]) -> None:
        """So many steps are done. `loss` is called if figures are due."""
        if not self._is_wanted():
            return
        now_s = time.monotonic()
        if self._begun is None:
            self._begun = step, now_s
            return
        if step % self._every:
            return
        value = loss()  # waits for the step
        now_s = time.monotonic()
        count = step - self._begun[0]
        if count < 1:
            return
        step_s = (now_s - self._begun[1]) / count
        self._begun = step, now_s
        saved, tokens = self._checkpoint, self._tokens_per_step
        metrics = TrainingMetrics(
            step=step,
            step_s=step_s,
            tokens_per_s=None if tokens is None or not step_s else tokens / step_s,
            mfu=self._mfu(step_s),
            memory_bytes=memory_in_use(),
            loss=value,
            restarts=self.restarts,
            checkpoint_step=None if saved is None else saved[0],
            checkpoint_age_s=None if saved is None else now_s - saved[1],
        )
        for sink in self._sinks:
            sink(metrics)

    def _is_wanted(self) -> bool:
        """Whether anybody gets figures: to measure them, training waits for a step."""
        return any(s is not log_metrics or LOGGER.isEnabledFor(logging.INFO) for s in self._sinks)

    def _mfu(self, step_s: float) -> float | None:
        step = self._step
        if not isinstance(step, ParallelFunction) or step.last_planned is None or not step_s:
            return None
        plan = step.last_planned.plan
        if self._rates is None or self._rates[0] is not plan:
            self._rates = plan, rates_of(plan)
        rates = self._rates[1]
        if rates is None or plan.estimated_step_s is None:
            return None
        return rates.model * plan.estimated_step_s / step_s / rates.peak

    def close(self) -> None:
        for sink in self._sinks:
            close = getattr(sink, "close", None)
            if callable(close):
                close()


def memory_in_use() -> int | None:
    """Bytes in use on the fullest device of the session; None where JAX does not count them."""
    remote = session.current().remote
    if remote is None:
        stats = [device.memory_stats() or {} for device in jax.local_devices()]
        found = [int(one["bytes_in_use"]) for one in stats if "bytes_in_use" in one]
        return max(found, default=None)
    try:
        return max(remote.device_bytes(_ASK_LIMIT_S), default=0) or None
    except (WorkerError, ClusterError) as error:  # the next step will tell
        LOGGER.warning("Workers did not say how much memory they use: %s", error)
        return None

"""Tracing with errors that name arguments as the user does: a call → `TracedStep`.

What the user's own function raises goes through unchanged, at most with a note.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import tree_flatten

from autopar.errors import ArgumentError, TraceError, shortened
from autopar.ir.traced_step import FlatCall, TracedStep
from autopar.tracer.batch_arguments import AUTO
from autopar.tracer.flat_call import argument_names, flatten_call
from autopar.tracer.trace_step import trace_step


class DefaultBatch(tuple[int, ...]):
    """The default of `batch_argnums`, as opposed to the same positions given by the user: argument
    1 and all that go along with it."""


DEFAULT_BATCH = DefaultBatch((1,))


@dataclass(frozen=True)
class StepOptions:
    """How the user's function is called: arguments of `parallelize`."""

    static_argnums: tuple[int, ...] = ()
    donate_argnums: tuple[int, ...] | str = "auto"
    batch_argnums: tuple[int, ...] | str = AUTO

    @classmethod
    def checked(
        cls,
        static_argnums: int | Sequence[int] = (),
        donate_argnums: Sequence[int] | str = "auto",
        batch_argnums: int | Sequence[int] = DEFAULT_BATCH,
    ) -> StepOptions:
        """The options as users write them, with single positions as tuples."""
        return cls(
            _positions("static_argnums", static_argnums),
            AUTO if donate_argnums == AUTO else _positions("donate_argnums", donate_argnums),
            AUTO
            if isinstance(batch_argnums, DefaultBatch)
            else _positions("batch_argnums", batch_argnums),
        )


def _positions(name: str, given: Any) -> tuple[int, ...]:
    positions = tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(p, int) and not isinstance(p, bool) and p >= 0 for p in positions):
        auto = "'auto' or " if name == "donate_argnums" else ""
        raise ArgumentError(
            f"{name}={given!r}: needs {auto}argument positions, whole numbers ≥ 0 such as (0,)."
        )
    return positions


def step_and_options(
    call: str,
    fn: Any,
    static_argnums: int | Sequence[int],
    batch_argnums: int | Sequence[int],
) -> tuple[Callable[..., Any], StepOptions]:
    """The function to trace and its options; a parallelized function has its own. `call`: the
    user's, for errors."""
    if isinstance(options := getattr(fn, "options", None), StepOptions):
        return fn.__wrapped__, options
    if not callable(fn):
        raise ArgumentError(f"{call}({fn!r}): the first argument must be the train step.")
    options = StepOptions.checked(static_argnums, batch_argnums=batch_argnums)
    return fn, options


def trace(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: StepOptions,
    batch: tuple[int, ...] | None = None,
) -> TracedStep:
    """`batch`: the inputs that are the batch, if known from another call of that structure."""
    call = flatten_call(fn, args, kwargs, options.static_argnums)
    _check_batch(fn, args, kwargs, call, options)
    try:
        return trace_step(
            fn,
            args,
            kwargs,
            static_argnums=options.static_argnums,
            donate_argnums=options.donate_argnums,
            batch_argnums=options.batch_argnums,
            batch=batch,
        )
    except TypeError as error:
        _explain(error, call)
        raise


def _explain(error: TypeError, call: FlatCall) -> None:
    """Raise a `TraceError` if an argument is no array."""
    for leaf, path in zip(call.leaves, call.paths, strict=True):
        try:
            jax.eval_shape(lambda x: x, leaf)
        except TypeError:
            raise TraceError(
                f"{path}: a {type(leaf).__name__} of {leaf.dtype} is no array that JAX can "
                "trace. Convert it with numpy.asarray to numbers or booleans first."
            ) from error


def _check_batch(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    call: FlatCall,
    options: StepOptions,
) -> None:
    """Refuse a batch argument that holds text or another object before the model trips over it.
    Functions pass (optimizers consist of them). Without an explicit `batch_argnums` so does
    anything, if a third argument has arrays: that may be the batch."""
    owners = set(call.argument)
    given_positions = options.batch_argnums
    if isinstance(given_positions, str):
        if len(owners) != 1:
            return
        given_positions = (1,)
    names = argument_names(fn)
    for position in given_positions:
        name = names[position] if position < len(names) else f"args[{position}]"
        if position in options.static_argnums or owners & {position, name}:
            continue
        given = args[position] if position < len(args) else kwargs.get(name)
        odd = [leaf for leaf in tree_flatten(given)[0] if not callable(leaf)]
        if odd:
            raise TraceError(
                f"{name}: the batch argument holds no array, but a {type(odd[0]).__name__}: "
                f"{shortened(odd[0])}. Pass arrays with a leading batch dimension; or say with "
                "batch_argnums which arguments have them, and with static_argnums which are part "
                "of the program."
            )

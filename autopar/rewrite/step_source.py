"""The user's step in every form that planning asks for: a function and its trace → `TracedStep`s.

    whole                        as the user called it
    as_loop(n)                   as a loop over n micro-batches, scans over layers written out
    with_recomputation(layers)   with these layers computed again in the backward pass, and scans
                                 that stack less
    written_out                  all of these, of the step with its scans over layers written out

A micro-batch's program follows from the whole batch's trace where rows are treated alike; otherwise
each number of micro-batches costs one more trace, once. A step that names the size of its batch may
fail there: then the program is derived all the same, if nothing but numbers of rows is in the way.
Searches ask for the same forms again, so the last few are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from traceback import extract_tb
from typing import Any

from autopar.errors import TraceError
from autopar.ir.traced_step import TracedStep
from autopar.rewrite.accumulate import accumulate, batch_size, micro_batch_leaves
from autopar.rewrite.gradient_waits import await_gradients
from autopar.rewrite.layers import Layer, find_layers
from autopar.rewrite.merge_equal import merge_equal
from autopar.rewrite.micro_batch_trace import derive_micro_batch
from autopar.rewrite.partial_remat import with_parts
from autopar.rewrite.product_orders import order_products
from autopar.rewrite.remat import with_remat
from autopar.rewrite.rows_by_index import slice_rows
from autopar.rewrite.scan_residuals import thin_scans
from autopar.rewrite.select_branches import select_branches
from autopar.rewrite.single_microbatch import loop_single_microbatch
from autopar.rewrite.unroll_scans import unroll_scans
from autopar.tracer.trace import StepOptions, trace

# A number of micro-batches, and the layers to recompute: their names and equations.
_Form = tuple[int, tuple[tuple[str, tuple[int, ...]], ...]]
_MOST_KEPT = 4  # steps of any form
# Equations of a step whose layers are written out: 50 blocks or so, which XLA compiles for a GPU in
# a minute of one core, for 15 seconds as a scan.
_MOST_UNROLLED = 15_000


@dataclass
class StepSource:
    fn: Callable[..., Any]
    options: StepOptions
    whole: TracedStep
    _micro: dict[int, TracedStep] = field(default_factory=dict, init=False)
    _loops: dict[int, TracedStep] = field(default_factory=dict, init=False)
    _changed: dict[_Form, TracedStep] = field(default_factory=dict, init=False)
    _waiting: dict[_Form, TracedStep] = field(default_factory=dict, init=False)
    _scanned: StepSource | None = None  # of a step that is written out: as it was traced

    @classmethod
    def of(
        cls,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: StepOptions,
    ) -> StepSource:
        return cls(fn, options, slice_rows(trace(fn, args, kwargs, options)))

    def micro_batch(self, num_micro_batches: int) -> TracedStep:
        """The step with one micro-batch."""
        if num_micro_batches not in self._micro:
            leaves = micro_batch_leaves(self.whole, num_micro_batches)
            micro = derive_micro_batch(self.whole, leaves) or self._traced(num_micro_batches)
            self._micro[num_micro_batches] = micro
        return self._micro[num_micro_batches]

    def _traced(self, num_micro_batches: int) -> TracedStep:
        """The step traced with one micro-batch."""
        if self._scanned is not None:
            return unroll_scans(self._scanned.micro_batch(num_micro_batches))
        leaves = micro_batch_leaves(self.whole, num_micro_batches)
        args, kwargs = self.whole.call.rebuild(leaves)
        try:
            return slice_rows(trace(self.fn, args, kwargs, self.options, batch=self.whole.batch))
        except Exception as error:
            derived = derive_micro_batch(self.whole, leaves, numbered=True)
            if derived is not None:
                return derived
            raise _no_micro_batch(self.whole, num_micro_batches, error) from error

    def as_loop(self, num_micro_batches: int) -> TracedStep:
        if num_micro_batches not in self._loops:
            whole = select_branches(self._unrolled)
            if num_micro_batches == 1:
                loop = _finished(loop_single_microbatch(whole))
            elif whole is self.whole:  # no scans, and no light branches
                loop = self._recomputing((), num_micro_batches)
            else:
                micro = select_branches(unroll_scans(self.micro_batch(num_micro_batches)))
                loop = _finished(accumulate(whole, micro, num_micro_batches))
            self._loops[num_micro_batches] = loop
        return self._loops[num_micro_batches]

    def with_recomputation(self, layers: Sequence[Layer], num_micro_batches: int = 1) -> TracedStep:
        """As one program; with more than one micro-batch, it loops over them."""
        form = num_micro_batches, tuple((layer.name, layer.equations) for layer in layers)
        step = self._waiting.get(form)
        if step is None:
            step = await_gradients(self._recomputing(layers, num_micro_batches))
        return _keep(self._waiting, form, step)

    def _recomputing(self, layers: Sequence[Layer], num_micro_batches: int) -> TracedStep:
        form = num_micro_batches, tuple((layer.name, layer.equations) for layer in layers)
        step = self._changed.get(form)
        if step is None and num_micro_batches == 1:
            step = _finished(thin_scans(with_remat(self.whole, layers)))
        elif step is None:
            micro = self.micro_batch(num_micro_batches)
            step = accumulate(self.whole, micro, num_micro_batches, layers)
            step = _finished(thin_scans(step))
        return _keep(self._changed, form, step)

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Those of the whole step, with their parts."""
        program, batch = self.whole.program, self.whole.batch
        return with_parts(program, find_layers(program, batch=batch), batch)

    @cached_property
    def written_out(self) -> StepSource | None:
        """The step with its scans over layers written out; None if it has none, or the program
        would be long to compile."""
        step = self._unrolled
        if step is self.whole or step.program.num_equations() > _MOST_UNROLLED:
            return None
        return StepSource(self.fn, self.options, replace(step, is_unrolled=True), self)

    @cached_property
    def _unrolled(self) -> TracedStep:
        return unroll_scans(self.whole)


def _keep(kept: dict[_Form, TracedStep], form: _Form, step: TracedStep) -> TracedStep:
    """Put the step last among those that are kept, and drop the first if they are too many."""
    kept.pop(form, None)
    kept[form] = step
    while len(kept) > _MOST_KEPT:
        del kept[next(iter(kept))]
    return step


def _finished(step: TracedStep) -> TracedStep:
    """With what is computed twice merged, and transposes of smaller arrays in place of larger."""
    program = merge_equal(step.program)
    return order_products(step if program is step.program else step.with_program(program))


def _no_micro_batch(step: TracedStep, num_micro_batches: int, error: Exception) -> TraceError:
    """For an error of the user's function, which has run with the whole batch."""
    size = batch_size(step, num_micro_batches)
    names = step.call.names_of(i for i in step.batch if step.avals[i].shape)
    text = str(error).partition("\n")[0].rstrip(".")
    line = _line_of(error)
    return TraceError(
        f"{step.name}: num_micro_batches={num_micro_batches} traces it with "
        f"{size // num_micro_batches} of the batch's {size} rows, and it fails"
        f"{f' at {line}' if line else ''}: {type(error).__name__}: {text}. If it names the size of "
        f"its batch, read that from the batch instead, as in x.shape[0]. The batch is "
        f"{' and '.join(names)}; say with batch_argnums if other arguments are, or use "
        "num_micro_batches=1."
    )


def _line_of(error: Exception) -> str:
    """The innermost line of the user's code that raised it; "" if none is known."""
    package, installed = str(Path(__file__).parents[1]), ("site-packages", "dist-packages")
    for frame in reversed(extract_tb(error.__traceback__)):
        if not frame.filename.startswith(package) and all(
            p not in frame.filename for p in installed
        ):
            return f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno} ({frame.name})"
    return ""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from autopar.errors import MemoryBudgetError
from autopar.ir.devices import DEVICES
from autopar.rewrite.layers import Layer
from autopar.sharding.deadline import Deadline
from autopar.sharding.planning_log import PlanningLog
from autopar.sharding.remat_choice import choose_remat

GIB = 2**30
DEVICE = DEVICES["h100-sxm"]
NUM_DEVICES = 4


def layers(count: int, flops: float = 0.0, residual: float = 4 * GIB) -> list[Layer]:
    return [Layer(f"layer {i}", (i,), (), flops, int(residual), 0) for i in range(count)]


@dataclass
class Model:
    """A step of which every kept layer takes a GiB per device, recomputing one costs a second, and
    every GiB too much can be saved at a price by another sharding, down to a floor."""

    num_layers: int = 8
    budget: float = 4.0
    price: float = 10.0
    saveable: float = 1.0

    def __post_init__(self) -> None:
        self.tried: list[int] = []

    def layers(self):
        return layers(self.num_layers, self.flops, self.residual)

    def peak_floor(self, budget: float) -> float:
        return float("-inf")

    def plan(self, chosen, mesh_shape, *, in_full):
        self.tried += [] if in_full else [len(chosen)]
        peak, objective = self.num_layers - len(chosen), 10.0 + len(chosen)
        excess = peak - self.budget
        if excess > self.saveable:
            raise MemoryBudgetError("too much", (peak - self.saveable) * GIB, self.budget * GIB)
        unbounded = () if excess <= 0 else (objective, peak * GIB)
        solver = SimpleNamespace(
            objective=objective + max(0.0, excess) * self.price, unbounded=unbounded
        )
        plan = SimpleNamespace(
            solver=solver,
            mesh_shape=(4,),
            memory_budget_bytes=self.budget * GIB,
            num_micro_batches=1,
            num=len(chosen),
        )
        return SimpleNamespace(plan=plan)

    def choose(self, flops: float = 0.0, residual: float = 4 * GIB) -> int:
        self.flops, self.residual = flops, residual
        return choose_remat(self, DEVICE, NUM_DEVICES).plan.num


def test_nothing_is_recomputed_where_all_fits() -> None:
    model = Model(budget=8)
    assert model.choose() == 0
    assert model.tried == [0]


def test_as_many_layers_as_are_needed() -> None:
    """8 − 4 GiB must go; by sharding it would cost more."""
    model = Model(budget=4, saveable=100.0)
    assert model.choose() == 4
    assert model.tried == [0, 4]


def test_another_sharding_where_it_is_cheaper() -> None:
    assert Model(budget=6, price=0.1, saveable=100.0).choose() == 0


def test_no_try_is_made_that_flops_rule_out() -> None:
    """Recomputing two layers would take longer than the price of the budget."""
    model = Model(budget=6, price=0.1, saveable=100.0)
    seconds = DEVICE.flops_16bit * DEVICE.efficiency * NUM_DEVICES
    assert model.choose(flops=seconds) == 0
    assert model.tried == [0]


@pytest.mark.parametrize(("left_s", "tried"), [(4.0, [0]), (8.0, [0, 4])])
def test_no_try_is_made_for_which_there_is_no_time(
    monkeypatch: pytest.MonkeyPatch, left_s: float, tried: list[int]
) -> None:
    """A first try takes about as long as the plan without recomputation, six seconds here."""
    model, log, now = Model(budget=4, saveable=100.0), PlanningLog(), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    log.deadline = Deadline(6.0 + left_s)
    plan = model.plan

    def slow(*args, **kwargs):
        now[0] += 6.0
        return plan(*args, **kwargs)

    model.plan = slow  # pyright: ignore[reportAttributeAccessIssue]
    model.flops, model.residual = 0.0, 4 * GIB
    choose_remat(model, DEVICE, NUM_DEVICES, log)
    assert model.tried == tried
    assert bool(log.deadline.left_out) == (tried == [0])


def test_more_where_the_estimate_was_too_low() -> None:
    """Layers seem to free twice what they do; what the first try saved corrects it."""
    model = Model(budget=2, saveable=0.5)
    assert model.choose(residual=8 * GIB) == 7
    assert model.tried == [0, 3, 7]


def test_the_error_of_what_came_nearest() -> None:
    with pytest.raises(MemoryBudgetError) as caught:
        Model(budget=-3, saveable=0.0).choose()
    assert caught.value.peak_bytes == 0


def test_a_short_error_comes_at_once_where_nothing_can_fit() -> None:
    model = Model(budget=1, saveable=0.5)
    model.flops, model.residual = 0.0, 4 * GIB
    model.peak_floor = lambda budget: 1.5 * GIB  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(MemoryBudgetError, match="or more") as error:
        choose_remat(model, DEVICE, NUM_DEVICES, in_full=False)
    assert error.value.peak_bytes == 1.5 * GIB
    assert model.tried == [0]


def test_a_short_error_looks_at_every_order_first() -> None:
    """Without an explanation, all layers are tried once more, on meshes that tries left out."""
    orders: list[bool] = []

    class Large(Model):
        def plan(self, chosen, mesh_shape, *, in_full, every_order=False):
            orders.append(every_order)
            return super().plan(chosen, mesh_shape, in_full=in_full)

    model = Large(budget=-3, saveable=0.0)
    model.flops, model.residual = 0.0, 4 * GIB
    with pytest.raises(MemoryBudgetError):
        choose_remat(model, DEVICE, NUM_DEVICES, in_full=False)
    assert orders[-1] and not any(orders[:-1])
    assert model.tried[-1] == model.num_layers


@pytest.mark.parametrize(("budget", "fits"), [(1, True), (-3, False)])
def test_once_time_is_up_all_layers_are_tried_and_nothing_else(budget: float, fits: bool) -> None:
    model, log = Model(budget=budget, saveable=0.0), PlanningLog()
    model.flops, model.residual = 0.0, 4 * GIB
    log.deadline.interrupt()
    try:
        assert choose_remat(model, DEVICE, NUM_DEVICES, log, in_full=False).plan.num == 8
    except MemoryBudgetError:
        assert not fits
    assert model.tried == [0, 8]
    assert any("recomputing" in what for what in log.deadline.left_out) == fits

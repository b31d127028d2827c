import gc
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import ArgumentError, DataError
from autopar.tracer.trace import DEFAULT_BATCH

SOON_S = 5.0


def train(state, batch):
    def loss_of(w):
        return ((batch["x"] @ w - batch["y"]) ** 2).mean()

    loss, grad = jax.value_and_grad(loss_of)(state["w"])
    return {"w": state["w"] - 0.05 * grad}, loss


def make_state():
    return {"w": jnp.ones((8, 4))}


def make_batch(number, rows=16):
    random = np.random.default_rng(number)
    return {
        "x": random.normal(size=(rows, 8)).astype(np.float32),
        "y": random.normal(size=(rows, 4)).astype(np.float32),
    }


def batches(count=5):
    return [make_batch(i) for i in range(count)]


@pytest.fixture
def step():
    return autopar.parallelize(train, method=autopar.DataParallel())


@pytest.fixture(scope="module")
def planned_step():
    """Planned for one shape of batches; a test that plans for others takes `step`."""
    step = autopar.parallelize(train, method=autopar.DataParallel())
    step(make_state(), make_batch(0))
    return step


@pytest.fixture(autouse=True)
def _no_thread_remains():
    yield
    gc.collect()
    assert eventually(lambda: not loader_threads()), "a loader's thread remains"


def loader_threads():
    return [t for t in threading.enumerate() if t.name == "autopar-data-loader"]


def eventually(condition):
    deadline = time.monotonic() + SOON_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def losses_of(step, source):
    state, losses = make_state(), []
    for batch in source:
        state, loss = step(state, batch)
        losses.append(float(loss))
    return losses


METHODS = {
    "data parallel": autopar.DataParallel(),
    "sharded": autopar.ShardParallel((4, 2)),
    "micro-batches": autopar.ShardParallel((8,), num_micro_batches=2),
    "pipeline": autopar.PipeshardParallel(
        num_micro_batches=2,
        layers=autopar.AutoLayers(2),
        stages=autopar.UniformStages(2),
    ),
}


def deep_train(state, batch):
    def loss_of(w):
        x = batch["x"]
        for _ in range(2):
            x = jnp.tanh(x @ w["a"]) @ w["b"]
        return ((x @ w["w"] - batch["y"]) ** 2).mean()

    loss, grad = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda p, g: p - 0.05 * g, state, grad), loss


@pytest.mark.representatives("sharded", "pipeline")
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_training_is_the_same_with_a_loader(method):
    def losses(wrap):
        step = autopar.parallelize(deep_train, method=method)
        state = {"w": jnp.ones((8, 4)), "a": jnp.ones((8, 8)) / 8, "b": jnp.ones((8, 8)) / 8}
        found = []
        for batch in wrap(batches(), step):
            state, loss = step(state, batch)
            found.append(float(loss))
        return found

    assert losses(autopar.data_loader) == losses(lambda source, _: source)


@pytest.mark.ci
def test_arguments_of_a_function_made_of_parts_are_placed():
    """An initialiser beside a pipeline has a program per stage."""

    def create(scale):
        return {"w": scale * jnp.ones((8, 4)), "a": jnp.ones((8, 8)), "b": scale * jnp.ones((8, 8))}

    step = autopar.parallelize(deep_train, method=METHODS["pipeline"])
    made = autopar.parallelize(create, method=autopar.CreateStateParallel(step, make_batch(0)))
    made(np.float32(2))
    placed = made.last_executable.place_inputs({0: np.float32(3)})
    assert placed[0].sharding == made.last_executable.input_shardings[0]
    np.testing.assert_array_equal(made(placed[0])["w"], np.full((8, 4), 3.0))


def test_batches_come_in_order_and_lie_as_planned(planned_step):
    wanted = planned_step.last_executable.input_shardings
    with autopar.data_loader(batches(), planned_step) as loader:
        for number, batch in enumerate(loader):
            for name, sharding in zip(("x", "y"), wanted[1:], strict=True):
                assert batch[name].sharding == sharding
                np.testing.assert_array_equal(batch[name], make_batch(number)[name])
    assert number == 4


def test_batches_come_as_they_are_until_there_is_a_plan(step):
    first, second = autopar.data_loader(batches(2), step)
    assert type(first["x"]) is np.ndarray
    np.testing.assert_array_equal(second["y"], make_batch(1)["y"])


def test_batches_are_placed_from_the_plan_on(step):
    kinds = []
    with autopar.data_loader(batches(8), step, prefetch=1) as loader:
        state = make_state()
        for batch in loader:
            kinds.append(isinstance(batch["x"], jax.Array))
            state, _ = step(state, batch)
    assert not kinds[0] and all(kinds[2:])


@pytest.mark.ci
def test_a_smaller_last_batch_is_passed_on_as_it_is(step):
    step(make_state(), make_batch(0))
    full, small = autopar.data_loader([make_batch(0), make_batch(1, rows=8)], step)
    assert isinstance(full["x"], jax.Array) and type(small["x"]) is np.ndarray
    step(make_state(), small)


def test_each_plan_gets_its_batches(step):
    step(make_state(), make_batch(0))
    step(make_state(), make_batch(0, rows=8))
    sizes = (8, 16, 8, 16)
    for batch in autopar.data_loader([make_batch(0, rows) for rows in sizes], step):
        assert isinstance(batch["x"], jax.Array)


def test_other_structures_and_types_are_passed_on(planned_step):
    odd = [
        {"x": make_batch(0)["x"]},
        tuple(make_batch(0).values()),
        make_batch(0)["x"],
        {k: v.astype(np.int32) for k, v in make_batch(0).items()},
        "text",
        None,
    ]
    for given, got in zip(odd, autopar.data_loader(odd, planned_step), strict=True):
        assert jax.tree.structure(given) == jax.tree.structure(got)
        assert not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(got))


# -- how far ahead


@pytest.mark.parametrize("prefetch", [1, 3])
def test_the_source_is_at_most_prefetch_batches_ahead(planned_step, prefetch):
    taken, ahead = [0], []

    def source():
        for batch in batches(12):
            taken[0] += 1
            yield batch

    with autopar.data_loader(source(), planned_step, prefetch=prefetch) as loader:
        for used, _ in enumerate(loader, start=1):
            eventually(lambda: taken[0] == min(12, used + prefetch))  # noqa: B023
            time.sleep(0.01)
            ahead.append(taken[0] - used)
    assert max(ahead) == prefetch  # it does go ahead, and no further


def test_nothing_is_taken_before_the_first_batch_is_asked_for(step):
    taken = []
    loader = autopar.data_loader((taken.append(b) or b for b in batches()), step)
    time.sleep(0.05)
    assert not taken and not loader_threads()
    loader.close()


def test_batches_are_made_ready_while_the_step_runs(planned_step):
    """The source of the next batch runs while this one is in use."""
    started = threading.Event()

    def source():
        yield make_batch(0)
        started.set()
        yield make_batch(1)

    with autopar.data_loader(source(), planned_step) as loader:
        next(loader)
        assert started.wait(SOON_S)


# -- leaves


class TorchLike:
    """What matters of a torch tensor."""

    def __init__(self, values):
        self._values = values
        self.shape, self.dtype = values.shape, "torch.float32"

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self._values, dtype)


class TfLike:
    def __init__(self, values):
        self._values = values

    def numpy(self):
        return self._values


class OnAnotherDevice:
    def numpy(self):
        raise RuntimeError("tensor is on cuda:0")


@pytest.mark.representatives("TfLike")
@pytest.mark.parametrize("kind", [TorchLike, TfLike, jnp.asarray])
def test_tensors_of_other_libraries_become_arrays(step, kind):
    given = [{k: kind(v) for k, v in batch.items()} for batch in batches()]
    want = losses_of(autopar.parallelize(train, method=autopar.DataParallel()), batches())
    assert losses_of(step, autopar.data_loader(given, step)) == want


def test_a_tensor_that_numpy_cannot_read_is_named(planned_step):
    given = [make_batch(0), {"x": OnAnotherDevice(), "y": make_batch(1)["y"]}]
    loader = autopar.data_loader(given, planned_step)
    next(loader)
    with pytest.raises(DataError, match=r"batch\['x'\] of batch 1: a OnAnotherDevice .* cuda:0"):
        next(loader)


@jax.tree_util.register_dataclass
@dataclass
class Batch:
    x: np.ndarray
    y: np.ndarray


@pytest.mark.ci
def test_dataclasses_and_static_leaves_keep_their_form(step):
    def train_on(state, batch):
        data, name = batch
        assert name == "a name"
        return train(state, {"x": data.x, "y": data.y})

    step = autopar.parallelize(train_on, method=autopar.DataParallel())
    given = [(Batch(**batch), "a name") for batch in batches()]
    seen = []

    def noted(source):
        for batch in source:
            seen.append(batch)
            yield batch

    want = losses_of(autopar.parallelize(train, method=autopar.DataParallel()), batches())
    assert losses_of(step, noted(autopar.data_loader(given, step, prefetch=1))) == want
    assert isinstance(seen[-1][0], Batch) and isinstance(seen[-1][0].x, jax.Array)
    assert seen[-1][1] == "a name"


def reusing_source(count):
    """One that writes every batch into the same arrays."""
    own = make_batch(0)
    for number in range(count):
        for name, values in make_batch(number).items():
            own[name][...] = values
        yield own


@pytest.mark.ci
def test_a_source_may_reuse_its_arrays(step):
    want = losses_of(autopar.parallelize(train, method=autopar.DataParallel()), batches(8))
    assert losses_of(step, autopar.data_loader(reusing_source(8), step, prefetch=3)) == want


@pytest.mark.ci
def test_arrays_that_lie_on_several_devices_are_left_there(planned_step):
    sharding = planned_step.last_executable.input_shardings[0]
    batch = jax.device_put(make_batch(0), sharding)
    (got,) = autopar.data_loader([batch], planned_step)
    assert got["x"] is batch["x"]


# -- which argument


def separate(params, moments, x, y):
    state, loss = train({"w": params}, {"x": x, "y": y})
    moments = jax.tree.map(lambda m: m * 0.9 + params, moments)
    return state["w"], moments, loss


def separate_state():
    return jnp.ones((8, 4)), {"m": jnp.zeros((8, 4)), "v": jnp.zeros((8, 4))}


@pytest.mark.representatives("batch_argnums4-argument4", "batch_argnums0-None")
@pytest.mark.parametrize(
    ("batch_argnums", "argument"),
    [
        (DEFAULT_BATCH, None),
        ((2, 3), None),
        ((2, 3), (2, 3)),
        ((2, 3), ["x", 3]),
        ((2, 3), ("x", "y")),
    ],
)
def test_a_batch_may_be_several_arguments(batch_argnums, argument):
    step = autopar.parallelize(separate, method=autopar.DataParallel(), batch_argnums=batch_argnums)
    step(*separate_state(), **make_batch(0))
    step(*separate_state(), *make_batch(0).values())
    given = [tuple(batch.values()) for batch in batches(2)]
    for x, y in autopar.data_loader(given, step, argument=argument):
        assert x.sharding == y.sharding == step.last_executable.input_shardings[3]


@pytest.mark.parametrize("argument", [3, "y"])
def test_the_argument_of_the_batch_can_be_said(argument):
    step = autopar.parallelize(separate, method=autopar.DataParallel(), batch_argnums=(2, 3))
    step(*separate_state(), *make_batch(0).values())
    (y,) = autopar.data_loader([make_batch(0)["y"]], step, argument=argument)
    assert y.sharding == step.last_executable.input_shardings[4]


# -- errors and ends


def test_an_exception_of_the_source_comes_after_the_batches_before_it(planned_step):
    class Broken(Exception):
        pass

    def source():
        yield from batches(3)
        raise Broken("no more disk")

    loader = autopar.data_loader(source(), planned_step)
    for number in range(3):
        np.testing.assert_array_equal(next(loader)["x"], make_batch(number)["x"])
    with pytest.raises(Broken, match="no more disk") as caught:
        next(loader)
    assert "this was raised at batch 3" in caught.value.__notes__[0]
    with pytest.raises(StopIteration):
        next(loader)


def test_an_iterable_that_cannot_begin_says_so_at_next(step):
    class Source:
        def __iter__(self):
            raise OSError("no such file")

    with pytest.raises(OSError, match="no such file"):
        next(autopar.data_loader(Source(), step))


def closing_source(closed, count=100):
    try:
        for number in range(count):
            yield make_batch(number)
    finally:
        closed.append(threading.current_thread().name)


ENDS = {
    "close": lambda loader: (next(loader), loader.close(), loader.close()),
    "with": lambda loader: leave_with(loader),
    "break": lambda loader: leave_loop(loader),
    "garbage": lambda loader: next(loader),
    "all": lambda loader: list(loader),
    "error in the body": lambda loader: fail_in_body(loader),
}


def leave_with(loader):
    with loader:
        next(loader)


def leave_loop(loader):
    for _ in loader:
        break


def fail_in_body(loader):
    with pytest.raises(ZeroDivisionError), loader:
        for _ in loader:
            raise ZeroDivisionError


@pytest.mark.representatives("break", "garbage")
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
def test_however_it_ends_the_source_is_closed_and_the_thread_gone(planned_step, end):
    closed = []
    end(autopar.data_loader(closing_source(closed, 7), planned_step))
    gc.collect()
    assert eventually(lambda: closed == ["autopar-data-loader"] and not loader_threads())


def test_close_without_a_batch_starts_nothing(step):
    closed = []
    autopar.data_loader(closing_source(closed), step).close()
    assert not loader_threads()


def test_a_closed_loader_says_so(planned_step):
    loader = autopar.data_loader(batches(), planned_step)
    next(loader)
    loader.close()
    with pytest.raises(DataError, match="closed"):
        next(loader)


def test_what_closing_the_source_raises_is_shown(planned_step):
    def source():
        try:
            yield from batches(50)
        finally:
            raise OSError("cannot unmount")

    loader = autopar.data_loader(source(), planned_step)
    next(loader)
    with pytest.raises(OSError, match="cannot unmount"):
        loader.close()


def test_an_error_that_was_read_ahead_does_not_spoil_closing(planned_step):
    def source():
        yield make_batch(0)
        raise OSError("not reached without a loader")

    loader = autopar.data_loader(source(), planned_step)
    next(loader)
    assert eventually(lambda: not loader_threads())
    loader.close()


def test_a_second_loop_begins_anew_where_the_iterable_can(planned_step):
    loader = autopar.data_loader(batches(3), planned_step)
    assert [len(list(loader)) for _ in range(3)] == [3, 3, 3]
    next(iter(loader))
    assert len(list(loader)) == 2  # goes on where it stopped
    once = autopar.data_loader(iter(batches(3)), planned_step)
    assert [len(list(once)) for _ in range(2)] == [3, 0]


@pytest.mark.ci
def test_the_interpreter_ends_while_a_loader_is_in_use(tmp_path):
    marker = tmp_path / "closed"
    code = f"""
import jax, jax.numpy as jnp, numpy as np, autopar
step = autopar.parallelize(lambda w, x: (w - jax.grad(lambda w: ((x @ w) ** 2).mean())(w), 0),
                           method=autopar.DataParallel())
def source():
    try:
        while True:
            yield np.ones((8, 8), np.float32)
    finally:
        open({str(marker)!r}, "w").close()
loader = autopar.data_loader(source(), step)
step(jnp.ones((8, 8)), next(loader))
next(loader)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "") and marker.exists()


WRONG = {
    "step": (lambda step: autopar.data_loader([], train), "step=.*parallelized step"),
    "iterable": (lambda step: autopar.data_loader(7, step), "needs an iterable of batches"),
    "prefetch": (lambda step: autopar.data_loader([], step, prefetch=0), "prefetch=0"),
    "no number": (lambda step: autopar.data_loader([], step, prefetch=1.5), "prefetch=1.5"),
    "position": (lambda step: autopar.data_loader([], step, argument=-1), "argument=-1"),
    "several": (lambda step: autopar.data_loader([], step, argument=(1, None)), "argument="),
}


@pytest.mark.representatives("several", "step")
@pytest.mark.parametrize(("call", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_arguments_are_refused(step, call, message):
    with pytest.raises(ArgumentError, match=message):
        call(step)

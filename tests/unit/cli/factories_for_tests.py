"""Factories as users write them, right and wrong."""

import jax
import jax.numpy as jnp

import autopar


def make_step(batch: int = 32, hidden: int = 64):
    """A small regression by gradient descent."""

    def train_step(params, batch):
        def loss(params):
            hidden = jnp.tanh(batch["x"] @ params["up"])
            return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)

        grads = jax.grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    params = {"up": array(hidden, 4 * hidden), "down": array(4 * hidden, hidden)}
    return train_step, (params, {"x": array(batch, hidden), "y": array(batch, hidden)})


def make_parallel():
    step, args = make_step()
    return autopar.parallelize(step, method=autopar.DataParallel()), args


def make_with_kwargs(batch: int = 32):
    step, (params, rows) = make_step(batch)
    return step, (params,), {"batch": rows}


def make_tokens(batch: int = 8):
    def train_step(table, batch):
        def loss(table):
            return jnp.mean(table[batch["tokens"]] ** 2)

        return table - jax.grad(loss)(table)

    table = jax.ShapeDtypeStruct((64, 16), jnp.float32)
    return train_step, (table, {"tokens": jax.ShapeDtypeStruct((batch, 128), jnp.int32)})


def make_nothing():
    pass


def make_only_a_step():
    return make_step()[0]


def make_one_argument():
    step, (params, _) = make_step()
    return step, params


def make_not_callable():
    return 5, ()


def make_odd_kwargs():
    step, args = make_step()
    return step, args, [1]


def make_failing_inside():
    return make_failing()


def make_failing():
    raise ValueError("no weights here")


def needs(size):
    return make_step(size)


method = autopar.ShardParallel(mesh_shape=(4,))
not_a_method = 7

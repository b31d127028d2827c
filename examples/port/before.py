"""A classifier in Flax and its training loop: before.py runs on one device, after.py on all.

`diff before.py after.py` shows the two lines that changed. Without GPUs, set
JAX_NUM_CPU_DEVICES=8 to give after.py eight virtual devices.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

NUM_STEPS, BATCH_SIZE, NUM_FEATURES, NUM_CLASSES = 200, 128, 64, 10


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x):
        for width in (256, 256):
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(NUM_CLASSES)(x)


def make_batch(seed):
    """Points around ten centres, one per class."""
    centres = np.random.default_rng(0).standard_normal((NUM_CLASSES, NUM_FEATURES))
    random = np.random.default_rng(seed)
    labels = random.integers(NUM_CLASSES, size=BATCH_SIZE)
    points = centres[labels] + 2 * random.standard_normal((BATCH_SIZE, NUM_FEATURES))
    return {"points": points.astype(np.float32), "labels": labels.astype(np.int32)}


@jax.jit
def train_step(state, batch):
    def loss_fn(params):
        logits = state.apply_fn(params, batch["points"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        return losses.mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


@jax.jit
def accuracy(state, batch):
    logits = state.apply_fn(state.params, batch["points"])
    return jnp.mean(jnp.argmax(logits, axis=-1) == batch["labels"])


def main():
    model = Classifier()
    params = model.init(jax.random.key(0), jnp.zeros((1, NUM_FEATURES)))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))
    for step in range(1, NUM_STEPS + 1):
        state, loss = train_step(state, make_batch(step))
        if step == 1 or step % 50 == 0:
            correct = accuracy(state, make_batch(0))
            print(f"step {step}  loss {loss:.4f}  accuracy {correct:.2f}")
    kernel = state.params["params"]["Dense_1"]["kernel"]
    print(f"the largest kernel is on {len(kernel.sharding.device_set)} device(s)")


if __name__ == "__main__":
    main()

"""Haiku's networks and the DeepMind packages around it: distrax, rlax, jraph."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from tests.zoo.program import Size, ZooStep, zoo_program
from tests.zoo.steps import (
    images,
    label_loss,
    momentum,
    next_token_loss,
    tokens,
    train_step,
    train_step_with_statistics,
)


def _classifier(make_net: Any, rows: int, side: int, classes: int) -> ZooStep:
    import haiku as hk

    net = hk.transform_with_state(lambda x: make_net()(x, is_training=True))

    def make_variables() -> Any:
        return net.init(jax.random.key(0), jnp.zeros((2, side, side, 3)))

    def loss(params: Any, statistics: Any, batch: Any) -> Any:
        logits, statistics = net.apply(params, statistics, None, batch["image"])
        return label_loss(logits, batch["label"]), statistics

    return train_step_with_statistics(loss, make_variables, images(rows, side, classes))


@zoo_program(
    "haiku-resnet", source="dm-haiku", layers=True, packages=("haiku",), micro_batches=1,
    rtol=2e-2, atol=5e-3,
)  # fmt: skip
def haiku_resnet(size: Size) -> ZooStep:
    """BatchNorm with moving averages."""
    import haiku as hk

    if not size.is_small:
        return _classifier(lambda: hk.nets.ResNet50(1000), 2048, 224, 1000)

    def small() -> Any:
        return hk.nets.ResNet(
            blocks_per_group=(1, 1, 1, 1),
            num_classes=4,
            channels_per_group=(8, 8, 16, 16),
            bottleneck=False,
            use_projection=(True, True, True, True),
        )

    return _classifier(small, 8, 32, 4)


@zoo_program(
    "haiku-mobilenet", source="dm-haiku", layers=True, packages=("haiku",), micro_batches=1,
    rtol=2e-2, atol=5e-3,
)  # fmt: skip
def haiku_mobilenet(size: Size) -> ZooStep:
    """Depthwise convolutions: as many feature groups as channels."""
    import haiku as hk

    if not size.is_small:
        return _classifier(lambda: hk.nets.MobileNetV1(num_classes=1000), 4096, 224, 1000)
    strides, channels = (1, 2), (8, 16)

    def small() -> Any:
        return hk.nets.MobileNetV1(strides=strides, channels=channels, num_classes=4)

    return _classifier(small, 8, 16, 4)


@zoo_program("haiku-lstm", source="dm-haiku", packages=("haiku",))
def haiku_lstm(size: Size) -> ZooStep:
    """A two-layer LSTM language model under `hk.dynamic_unroll`."""
    import haiku as hk

    width, length, vocabulary, rows = (16, 6, 32, 8) if size.is_small else (2048, 256, 32000, 512)

    def forward(batch: jax.Array) -> jax.Array:
        core = hk.DeepRNN([hk.LSTM(width), jax.nn.relu, hk.LSTM(width)])
        x = hk.Embed(vocabulary, width)(batch)
        hidden, _ = hk.dynamic_unroll(core, x, core.initial_state(x.shape[0]), time_major=False)
        return hk.BatchApply(hk.Linear(vocabulary))(hidden)

    net = hk.without_apply_rng(hk.transform(forward))

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        return next_token_loss(net.apply(params, batch), batch)

    def make_params() -> Any:
        return net.init(jax.random.key(0), jnp.zeros((2, length), jnp.int32))

    return train_step(loss, make_params, tokens(rows, length, vocabulary))


@zoo_program("haiku-vqvae", source="dm-haiku", packages=("haiku",), rtol=5e-3, atol=1e-3)
def haiku_vqvae(size: Size) -> ZooStep:
    """A vector-quantized autoencoder: nearest codes, straight-through gradients, averaged codes."""
    import haiku as hk

    hidden, codes, side, rows = (8, 8, 8, 8) if size.is_small else (256, 8192, 256, 512)

    def forward(image: jax.Array) -> Any:
        x = jax.nn.relu(hk.Conv2D(hidden, 4, stride=2)(image))
        x = hk.Conv2D(hidden, 3)(x)
        coded = hk.nets.VectorQuantizerEMA(hidden, codes, commitment_cost=0.25, decay=0.9)(x, True)
        y = jax.nn.relu(hk.Conv2DTranspose(hidden, 4, stride=2)(coded["quantize"]))
        return jnp.mean((hk.Conv2D(3, 3)(y) - image) ** 2) + coded["loss"]

    net = hk.transform_with_state(forward)

    def make_variables() -> Any:
        return net.init(jax.random.key(0), jnp.zeros((2, side, side, 3)))

    def loss(params: Any, statistics: Any, batch: Any) -> Any:
        return net.apply(params, statistics, None, batch["image"])

    return train_step_with_statistics(loss, make_variables, images(rows, side, 4))


@zoo_program("jraph-graph-network", source="jraph", packages=("jraph", "haiku"))
def jraph_graph_network(size: Size) -> ZooStep:
    """A batch of padded graphs in one `GraphsTuple`; messages are summed by `segment_sum`."""
    import haiku as hk
    import jraph

    graphs, nodes, edges, width, depth = (8, 32, 64, 8, 2)
    if not size.is_small:
        graphs, nodes, edges, width, depth = (4096, 131072, 524288, 512, 8)

    def make_graph(i: int) -> Any:
        keys = jax.random.split(jax.random.key(i), 4)
        per_graph = nodes // graphs
        owner = jnp.arange(edges) // (edges // graphs)
        ends = jax.random.randint(keys[0], (2, edges), 0, per_graph) + owner * per_graph
        return jraph.GraphsTuple(
            nodes=jax.random.normal(keys[1], (nodes, width)),
            edges=jax.random.normal(keys[2], (edges, width)),
            senders=ends[0],
            receivers=ends[1],
            globals=jax.random.normal(keys[3], (graphs, width)),
            n_node=jnp.full(graphs, per_graph),
            n_edge=jnp.full(graphs, edges // graphs),
        )

    def forward(graph: Any) -> jax.Array:
        def update(*_: Any) -> Any:
            mlp = hk.nets.MLP([width, width])
            return jraph.concatenated_args(lambda x: mlp(x))

        for _ in range(depth):
            net = jraph.GraphNetwork(update(), update(), update())
            graph = net(graph)
        return hk.Linear(1)(graph.globals)

    net = hk.without_apply_rng(hk.transform(forward))

    def loss(params: Any, batch: Any) -> jax.Array:
        return jnp.mean((net.apply(params, batch["graph"])[:, 0] - batch["target"]) ** 2)

    def make_batch(i: int) -> tuple[Any, ...]:
        return ({"graph": make_graph(i), "target": jnp.sin(jnp.arange(graphs) + 0.5 * i)},)

    def make_params() -> Any:
        return net.init(jax.random.key(9), make_graph(0))

    return train_step(loss, make_params, make_batch, optax.sgd(1e-3))


@zoo_program("jraph-attention", source="jraph", packages=("jraph", "haiku"))
def jraph_attention(size: Size) -> ZooStep:
    """A graph attention network on one graph whose nodes are labelled: softmax over segments."""
    import haiku as hk
    import jraph

    nodes, edges, width, classes = (16, 48, 8, 4) if size.is_small else (169343, 1166243, 256, 40)

    def forward(graph: Any) -> jax.Array:
        query = hk.Linear(width)
        score = hk.Linear(1)

        def logits(sent: jax.Array, received: jax.Array, _: Any) -> jax.Array:
            return jax.nn.leaky_relu(score(jnp.concatenate([sent, received], -1)))

        net = jraph.GAT(query, logits, lambda x: jax.nn.elu(x))
        graph = net(graph)
        return hk.Linear(classes)(graph.nodes)

    net = hk.without_apply_rng(hk.transform(forward))

    def make_graph(i: int) -> Any:
        one, two = jax.random.split(jax.random.key(i))
        ends = jax.random.randint(one, (2, edges), 0, nodes)
        return jraph.GraphsTuple(
            nodes=jax.random.normal(two, (nodes, width)),
            edges=None,
            senders=ends[0],
            receivers=ends[1],
            globals=None,
            n_node=jnp.array([nodes]),
            n_edge=jnp.array([edges]),
        )

    def loss(params: Any, graph: Any, labels: jax.Array) -> jax.Array:
        return label_loss(net.apply(params, graph), labels)

    def make_batch(i: int) -> tuple[Any, ...]:
        return make_graph(i), jnp.arange(nodes) % classes

    return train_step(loss, lambda: net.init(jax.random.key(9), make_graph(0)), make_batch)


@zoo_program("distrax-flow", source="distrax", layers=True, packages=("distrax", "haiku"))
def distrax_flow(size: Size) -> ZooStep:
    """A masked coupling flow of distrax's bijectors, as in its example."""
    import distrax
    import haiku as hk

    width, hidden, layers, rows = (6, 8, 2, 16) if size.is_small else (1024, 4096, 16, 16384)

    def log_prob(x: jax.Array) -> jax.Array:
        mask = jnp.arange(width) % 2 == 0
        flows = []
        for _ in range(layers):
            net = hk.Sequential(
                [hk.nets.MLP([hidden, hidden], activate_final=True), hk.Linear(2 * width)]
            )

            def bijector(params: jax.Array) -> Any:
                shift, scale = jnp.split(params, 2, -1)
                return distrax.ScalarAffine(shift=shift, log_scale=jnp.tanh(scale))

            flows.append(distrax.MaskedCoupling(mask=mask, bijector=bijector, conditioner=net))
            mask = ~mask
        base = distrax.MultivariateNormalDiag(jnp.zeros(width), jnp.ones(width))
        return distrax.Transformed(base, distrax.Chain(flows)).log_prob(x)

    net = hk.without_apply_rng(hk.transform(log_prob))

    def loss(params: Any, rows: jax.Array) -> jax.Array:
        return -net.apply(params, rows).mean()

    def make_batch(i: int) -> tuple[Any, ...]:
        return (jax.random.normal(jax.random.key(i), (rows, width)),)

    def make_params() -> Any:
        return net.init(jax.random.key(0), jnp.zeros((2, width)))

    return train_step(loss, make_params, make_batch, optax.sgd(1e-2))


@zoo_program("rlax-dqn", source="rlax", packages=("rlax", "haiku"))
def rlax_dqn(size: Size) -> ZooStep:
    """Double Q-learning with a target network that is copied every second step."""
    import haiku as hk
    import rlax

    hidden, side, actions, rows = (16, 12, 4, 16) if size.is_small else (4096, 84, 18, 4096)

    def forward(frame: jax.Array) -> jax.Array:
        x = jax.nn.relu(hk.Conv2D(16 if side < 20 else 64, 3, 2)(frame))
        return hk.nets.MLP([hidden, actions])(hk.Flatten()(x))

    net = hk.without_apply_rng(hk.transform(forward))
    optimizer = momentum()

    def make_state() -> Any:
        params = net.init(jax.random.key(0), jnp.zeros((1, side, side, 4)))
        target = jax.tree.map(jnp.copy, params)
        return {
            "params": params,
            "target": target,
            "optimizer": optimizer.init(params),
            "count": jnp.zeros((), jnp.int32),
        }

    def make_batch(i: int) -> tuple[Any, ...]:
        frames = jax.random.normal(jax.random.key(i), (2, rows, side, side, 4))
        action = (jnp.arange(rows) + i) % actions
        reward = jnp.cos(jnp.arange(rows) * 1.0)
        return (
            {"now": frames[0], "next": frames[1], "action": action, "reward": reward,
             "discount": jnp.full(rows, 0.9)},
        )  # fmt: skip

    def step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            now, select = net.apply(params, batch["now"]), net.apply(params, batch["next"])
            value = net.apply(state["target"], batch["next"])
            learn = jax.vmap(rlax.double_q_learning)
            errors = learn(now, batch["action"], batch["reward"], batch["discount"], value, select)
            return rlax.huber_loss(errors).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt_state = optimizer.update(grads, state["optimizer"])
        params = optax.apply_updates(state["params"], updates)
        target = optax.periodic_update(params, state["target"], state["count"], 2)
        new = {"params": params, "target": target, "optimizer": opt_state}
        return {**new, "count": state["count"] + 1}, loss

    return ZooStep(step, make_state, make_batch)

"""A GPT in two pipeline stages on a Ray cluster: two hosts with a worker process each.

    python examples/pipelines_on_ray.py
    python examples/pipelines_on_ray.py --address auto --size 1.3b --batch 256 --micro-batches 16

The first command starts Ray here, with two hosts of two virtual CPU devices each; the second joins
the cluster that this host belongs to and uses all its GPUs. Arrays stay on the workers; only the
loss comes back. See docs/ray.md.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import jax

import autopar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the package `examples` is
from examples import common, data
from examples.gpt import SIZES, make_example


def main() -> None:
    parser = common.arguments(__doc__, sizes=SIZES, size="tiny", steps=30, batch=16)
    parser.set_defaults(cluster="ray")
    parser.add_argument("--stages", type=common.whole_number, default=2)
    parser.add_argument("--micro-batches", type=common.whole_number, default=4)
    parser.add_argument("--schedule", choices=["gpipe", "1f1b", "1f1b_eager"], default="1f1b")
    arguments = parser.parse_args()
    if arguments.address is None and arguments.hosts is None and arguments.devices is None:
        arguments.hosts, arguments.devices = 2, 4
    example = make_example(arguments.size, arguments.batch)
    config, shapes = example.config, example.abstract_batch()
    with common.devices(arguments):
        method = autopar.PipeshardParallel(
            arguments.micro_batches,
            stages=autopar.UniformStages(arguments.stages),
            schedule=arguments.schedule,
        )
        train_step = autopar.parallelize(example.train_step, method=method)
        method = autopar.CreateStateParallel(train_step, shapes)
        state = autopar.parallelize(example.create_state, method=method)(jax.random.key(0))
        plan = train_step.plan(state, shapes)
        common.show(plan)
        for number, stage in enumerate(plan.stages):
            names = ", ".join(plan.layers[slice(*stage.layers)])
            print(f"stage {number}: {names}, on devices {stage.devices} of mesh {stage.mesh}")

        progress = common.Progress(arguments.steps, "tokens", arguments.batch * config.seq_len)
        source = data.token_chains(config.vocab_size, config.seq_len, arguments.batch)
        source = itertools.islice(source, arguments.steps)
        with autopar.data_loader(source, train_step) as batches:
            for batch in batches:
                state, loss = train_step(state, batch)
                progress(loss)
        meshes = {leaf.mesh for leaf in jax.tree.leaves(state)}
        print(f"the state is on {len(meshes)} meshes")


if __name__ == "__main__":
    main()

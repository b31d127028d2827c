"""Plans GPT-1.3B for a host of eight H100s and explains the plan. Nothing runs, so neither the
cluster nor its memory need exist.

    python -m examples.read_a_plan [--depth 3] [--save plan.json]

`docs/reading_a_plan.md` explains the output.
"""

from __future__ import annotations

import argparse

import autopar
from examples.models import build

CLUSTER = autopar.ClusterSpec(num_hosts=1, devices_per_host=8, device="h100-sxm")
BATCH_SIZE = 4


def plan_of(method: autopar.ShardParallel) -> autopar.ParallelPlan:
    example = build("gpt-1.3b")
    state, batch = example.abstract_state(), example.abstract_batch(BATCH_SIZE)
    return autopar.plan(example.train_step, state, batch, cluster=CLUSTER, method=method)


def main() -> None:
    parser = argparse.ArgumentParser(description="Plan GPT-1.3B and explain the plan.")
    parser.add_argument("--depth", type=int, help="levels of modules to show")
    parser.add_argument("--save", help="write the plan to this file")
    arguments = parser.parse_args()
    best = plan_of(autopar.ShardParallel())
    print(best.explain(depth=arguments.depth, detail="full"))
    print("\n--- compared with the best plan on a mesh of one axis ---\n")
    print(autopar.diff(best, plan_of(autopar.ShardParallel(mesh_shape=(8,)))))
    if arguments.save:
        best.save(arguments.save)


if __name__ == "__main__":
    main()

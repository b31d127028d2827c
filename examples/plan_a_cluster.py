"""Plans GPT for clusters of H100s that you need not have: step time, memory, number of devices.

    python examples/plan_a_cluster.py
    python examples/plan_a_cluster.py --size 6.7b --batch 1024 --hosts 2 4 8 --device a100-sxm-80gb

Nothing runs and no GPU is needed; times are predictions. The fastest plan is written as a file for
`parallelize(step, method=ParallelPlan.load("plan.json"))`, and as a page to look at.
`--pipelines` also searches pipelines, which takes longer. The same on the command line:

    autopar sweep examples/gpt.py:make_step --set size=350m --set batch=64 \\
        --cluster 1x8:h100-sxm --devices 8,16,32 --method shard
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import autopar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the package `examples` is
from examples import common
from examples.gpt import SIZES, make_example


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=list(SIZES), default="350m")
    parser.add_argument("--batch", type=common.whole_number, default=64, help="sequences per step")
    parser.add_argument("--hosts", type=common.whole_number, nargs="+", default=[1, 2, 4])
    parser.add_argument("--device", default="h100-sxm", help="`autopar devices` lists them")
    parser.add_argument("--output", type=Path, default=Path("plan"), help="folder to create")
    parser.add_argument("--pipelines", action="store_true")
    arguments = parser.parse_args()

    method = autopar.AutoParallel() if arguments.pipelines else autopar.ShardParallel()
    example = make_example(arguments.size, arguments.batch)
    state, batch = example.abstract_state(), example.abstract_batch()
    tokens = arguments.batch * example.config.seq_len
    print(f"GPT-{arguments.size}, {example.num_params / 1e6:,.0f} million parameters")
    plans = []
    for hosts in arguments.hosts:
        cluster = autopar.ClusterSpec(num_hosts=hosts, devices_per_host=8, device=arguments.device)
        try:
            plan = autopar.plan(example.train_step, state, batch, cluster=cluster, method=method)
        except autopar.MemoryBudgetError as error:
            print(f"{hosts} × 8: does not fit: {str(error).splitlines()[0]}")
            continue
        plans.append(plan)
        shape = " + ".join("×".join(map(str, stage.mesh_shape)) for stage in plan.stages)
        print(
            f"{hosts} × 8 {arguments.device}: mesh {shape}, step {plan.estimated_step_s:.3f} s, "
            f"{tokens / plan.estimated_step_s:,.0f} tokens/s, "
            f"{plan.estimated_peak_bytes / 2**30:.1f} GiB per device",
            flush=True,
        )
    if not plans:
        raise SystemExit("no plan fits; use more --hosts, or a --device with more memory")
    best = min(plans, key=lambda plan: plan.estimated_step_s)
    print()
    common.show(best)
    arguments.output.mkdir(parents=True, exist_ok=True)
    best.save(arguments.output / "plan.json")
    best.report(arguments.output / "plan.html")
    print(f"plan: {arguments.output / 'plan.json'}, report: {arguments.output / 'plan.html'}")


if __name__ == "__main__":
    main()

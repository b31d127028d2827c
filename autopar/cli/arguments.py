"""What may be written on the command line of `autopar`."""

from __future__ import annotations

import argparse
import time
from typing import Any

from autopar import __version__

STARTED = time.perf_counter()  # near enough to the start of the process

METHODS = ("auto", "shard", "data", "zero2", "zero3", "pipeline")
SCHEDULES = ("gpipe", "1f1b", "1f1b_eager", "interleaved_1f1b", "zero_bubble", "inference")

_FACTORY = """\
FACTORY is FILE.py:FUNCTION or MODULE:FUNCTION. The function is called with the options of --set and
returns (step, args) or (step, args, kwargs); arguments may be jax.ShapeDtypeStructs. The file runs
as any Python program does: nothing keeps it from reading or changing your files.

CLUSTER is HOSTSxDEVICES:DEVICE, such as 50x4:v100-32gb (`autopar devices` lists them), or the path
of a TOML file with the tables [cluster], [device] and [links]; see docs/simulation.md.
"""

_PROFILE = """\
Without --model, the machine is measured: products, convolutions, what memory and links can do. The
file that comes of it serves plans: `autopar plan --profile FILE`, ClusterSpec(profile="FILE").
With --model, parts of a user's step are measured; FACTORY is as for `autopar plan`.
See docs/profiling.md.
"""
_BENCH = """\
The parts: cpu is measured on 8 virtual CPU devices; h100 is compiled for 8, 16 and 64 H100s, which
need not be there (pip install 'autopar[verify]'), and judged from XLA's programs; h200 and serving
are measured on one GPU, if there is one; scaling is predicted. Without --only, cpu, h100 and h200
run. Results are kept in the folder, and the same command goes on where it was stopped. See
docs/benchmarks.md.
"""
_DOCTOR = """\
Exit codes: 0 if autopar can plan and run here, 1 if something that it needs is missing or broken.
Devices, Ray and solvers are asked by processes of their own, which are given up after --time-limit.
See docs/doctor.md.
"""
_EPILOGS = {
    "bench": _BENCH,
    "doctor": _DOCTOR,
    "plan": _FACTORY,
    "sweep": _FACTORY,
    "profile": _PROFILE,
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="autopar", description="Run a single-device JAX train step on many devices."
    )
    parser.add_argument("--version", action="version", version=f"autopar {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_demo(commands.add_parser("demo", help="train a small GPT, sharded and on one device"))
    _add_plan(_command(commands, "plan", "plan a step for a cluster that need not exist"))
    _add_sweep(_command(commands, "sweep", "plan for several sizes: how many devices are enough?"))
    _add_profile(_command(commands, "profile", "measure this machine, or a model's parts on it"))
    _add_bench(_command(commands, "bench", "compare plans with those of experts, from a clone"))
    _add_report(_command(commands, "report", "write the page of a saved plan"))
    _add_explain(_command(commands, "explain", "show a saved plan"))
    _add_diff(_command(commands, "diff", "show what differs between two saved plans"))
    _add_doctor(_command(commands, "doctor", "say what is installed, what is wrong, what to do"))
    _command(commands, "devices", "list the devices that are known, with their figures")
    return parser


def _command(commands, name: str, text: str) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_EPILOGS.get(name),
    )


def _add_demo(demo: argparse.ArgumentParser) -> None:
    demo.add_argument("--steps", type=_positive, default=30, help="training steps (default 30)")
    demo.add_argument("--batch-size", type=_positive, default=16, help="sequences per step")
    demo.add_argument(
        "--platform",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help="auto: the GPUs found, else 8 virtual CPU devices",
    )
    demo.add_argument(
        "--cluster",
        choices=("local", "ray"),
        default="local",
        help="ray: as a pipeline on a Ray cluster, started here if there is none",
    )


def _add_plan(plan: argparse.ArgumentParser) -> None:
    _add_step(plan)
    _add_micro_batches(plan)
    plan.add_argument("--batch", type=_positive, help="the same as --set batch=…")
    plan.add_argument("--budget", metavar="BYTES", help="memory per device to keep to, as 28GB")
    plan.add_argument("--save", metavar="FILE.json", help="write the plan")
    plan.add_argument("--report", metavar="FILE.html", help="write the plan's page")
    plan.add_argument("--depth", type=_positive, help="levels of the model's names that are shown")
    plan.add_argument(
        "--why",
        action="append",
        default=[],
        metavar="PATH",
        help="of an array, such as \"state.params['Dense_0']['kernel']\": why is it sharded so?",
    )
    plan.add_argument("--quiet", action="store_true", help="the summary alone, not all of the plan")
    plan.add_argument(
        "--verify",
        action="store_true",
        help="compile every stage for the target GPU, without one (pip install autopar[verify])",
    )
    plan.add_argument(
        "--target",
        metavar="GPU",
        help="of --verify: a name such as a100-40gb, or a description's path; default: the device",
    )


def _add_sweep(sweep: argparse.ArgumentParser) -> None:
    _add_step(sweep)
    varied = sweep.add_argument_group("what varies: lists such as 8,16,32, of one or two of these")
    varied.add_argument("--devices", metavar="LIST", help="numbers of devices")
    varied.add_argument("--batch", metavar="LIST", help="the factory's option `batch`")
    varied.add_argument("--micro-batches", metavar="LIST", help="numbers, or auto")
    varied.add_argument("--budget", metavar="LIST", help="memory per device, as 20GB,40GB")
    sweep.add_argument(
        "--price-per-hour", type=_price, metavar="PRICE", help="of one device, in any currency"
    )
    sweep.add_argument("--html", metavar="FILE.html", help="write a page with plots")
    sweep.add_argument("--json", metavar="FILE.json", help="write all points")
    sweep.add_argument("--jobs", type=_positive, default=2, help="processes (default 2)")


def _add_profile(profile: argparse.ArgumentParser) -> None:
    profile.add_argument(
        "--show", metavar="FILE", help="show a profile that was measured, or h200, cpu"
    )
    machine = profile.add_argument_group("the machine")
    machine.add_argument(
        "--output", "-o", metavar="FILE", help="of the profile; default: after the device's name"
    )
    machine.add_argument("--quick", action="store_true", help="few samples, about a minute")
    machine.add_argument(
        "--only",
        metavar="LIST",
        help="of overheads,memory,products,convolutions,streams,attentions,collectives,crossings",
    )
    machine.add_argument(
        "--time", type=_seconds, metavar="SECONDS", help="stop after that long with what there is"
    )
    machine.add_argument(
        "--restart", action="store_true", help="forget what an earlier run left unfinished"
    )
    machine.add_argument("--cluster", choices=("local", "ray"), default="local")
    machine.add_argument("--address", help="of a running Ray cluster; default: one is started here")
    machine.add_argument("--hosts", type=_positive, metavar="N", help="of --cluster ray")
    machine.add_argument(
        "--devices", type=_positive, metavar="N", help="the first N; with --cluster ray, per host"
    )
    machine.add_argument(
        "--platform",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help="auto: the GPUs found, else 8 virtual CPU devices",
    )
    model = profile.add_argument_group("a model's segments, or its strategies")
    model.add_argument("--model", metavar="FACTORY", help="my_train.py:make_step")
    _add_set(model)
    model.add_argument("--mesh", metavar="SHAPE", help="such as 8 or 2x4; default: all devices")
    model.add_argument("--profile", metavar="FILE", help="a measured machine, for predictions")
    model.add_argument("--json", metavar="FILE", help="write all figures")
    segments = profile.add_argument_group("segments: analysed, timed, and searched")
    segments.add_argument(
        "--passes", metavar="LIST", help="of analysis,profile,search; default: all three"
    )
    segments.add_argument("--folder", metavar="DIR", help="of the passes' files")
    segments.add_argument("--top", type=_positive, metavar="K", help="combinations per segment")
    segments.add_argument("--jobs", type=_positive, metavar="N", help="processes that compile")
    segments.add_argument(
        "--check", type=_positive, metavar="K", help="run the K best plans, keep the fastest"
    )
    strategies = profile.add_argument_group("strategies: all of them run, and compared")
    strategies.add_argument("--enumerate", action="store_true", help="time whole steps")
    strategies.add_argument("--limit", type=_positive, metavar="N", help="so many at most")
    timed = profile.add_argument_group("the database of timed plans")
    timed.add_argument("--database", action="store_true", help="list what was timed")
    timed.add_argument("--forget", action="store_true", help="clear it")


def _add_bench(bench: argparse.ArgumentParser) -> None:
    bench.add_argument("--only", metavar="LIST", help="of cpu,h100,h200,scaling,serving")
    bench.add_argument("--models", metavar="LIST", help="such as gpt,moe-10b; default: all")
    bench.add_argument("--devices", metavar="LIST", help="of h100: such as 8,64; default: all")
    bench.add_argument("--plans", metavar="A;B", help="of h100: autopar, FSDP and other families")
    bench.add_argument("--layers", type=_positive, metavar="N", help="shallower models, for all")
    bench.add_argument("--quick", action="store_true", help="few rows, two layers: some minutes")
    bench.add_argument("--jobs", type=_positive, default=2, help="processes (default 2)")
    bench.add_argument("--time-limit", type=_seconds, default=3600.0, metavar="SECONDS")
    bench.add_argument(
        "--folder",
        default="autopar-bench",
        metavar="DIR",
        help="of results; default autopar-bench",
    )
    bench.add_argument("--list", action="store_true", help="show the rows, run nothing")
    bench.add_argument("--show", metavar="FILE", help="show the tables of a results file")
    bench.add_argument("--merge-into", metavar="FILE", help="put the results into this file too")
    bench.add_argument("--rewrite", metavar="TEXT.md", help="put the tables between its markers")


def _add_doctor(doctor: argparse.ArgumentParser) -> None:
    doctor.add_argument("--json", action="store_true", help="print it as JSON, for bug reports")
    doctor.add_argument(
        "--time-limit",
        type=_seconds,
        default=120.0,
        metavar="SECONDS",
        help="for each thing that is asked (default 120)",
    )


def _add_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("factory", metavar="FACTORY", help="my_train.py:make_step")
    parser.add_argument("--cluster", required=True, help="such as 50x4:v100-32gb, or a TOML file")
    _add_set(parser)
    parser.add_argument(
        "--method",
        default=None,
        help=f"{', '.join(METHODS)}, or MODULE:OBJECT; default: auto, or what the step has",
    )
    parser.add_argument("--stages", type=_positive, help="of --method pipeline: so many, equal")
    parser.add_argument("--layers", type=_positive, help="of --method pipeline: so many")
    parser.add_argument("--schedule", choices=SCHEDULES, help="of --method pipeline")
    parser.add_argument(
        "--remat", choices=("auto", "none", "all"), help="layers that are computed again"
    )
    parser.add_argument(
        "--batch-argnums", type=_positions, metavar="LIST", help="arguments with a batch dimension"
    )
    parser.add_argument(
        "--profile",
        metavar="FILE",
        help="costs as measured by `autopar profile`: its file, or a name such as h200",
    )
    parser.add_argument("--memory", metavar="BYTES", help="of one device, as 32GB")
    parser.add_argument("--intra-bandwidth", metavar="RATE", help="of a device's link: 300GB/s")
    parser.add_argument("--inter-bandwidth", metavar="RATE", help="of a host's network: 100Gb/s")


def _add_set(parser: Any) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the factory; the value is JSON, or else a text",
    )


def _add_micro_batches(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--micro-batches", type=_count_or_auto, metavar="N", help="into how many the batch is cut"
    )


def _add_report(report: argparse.ArgumentParser) -> None:
    report.add_argument("plan", metavar="PLAN.json")
    report.add_argument(
        "--output", "-o", metavar="FILE.html", help="default: beside the plan, with .html"
    )
    report.add_argument("--measured", metavar="TRACE.json", help="a run's trace, by autopar.trace")


def _add_explain(explain: argparse.ArgumentParser) -> None:
    explain.add_argument("plan", metavar="PLAN.json")
    explain.add_argument("path", nargs="?", help="of a value: why is it sharded so?")
    explain.add_argument("--depth", type=_positive, help="levels of the model's names")


def _add_diff(diff: argparse.ArgumentParser) -> None:
    diff.add_argument("first", metavar="A.json")
    diff.add_argument("second", metavar="B.json")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number ≥ 1")
    return int(text)


def _count_or_auto(text: str) -> int | str:
    return text if text == "auto" else _positive(text)


def _positions(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text} is no list of positions such as 1 or 1,2")
    return tuple(map(int, parts))


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds > 0")
    return seconds


def _price(text: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = 0.0
    if not 0 < price < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a price > 0")
    return price

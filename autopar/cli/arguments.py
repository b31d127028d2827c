"""The command line of `autopar`: its commands, options and help."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from autopar import __version__
from autopar.errors import near_names

STARTED = time.perf_counter()  # close to the start of the process

COMMANDS = (
    "demo", "plan", "sweep", "profile", "bench", "report", "explain", "diff", "doctor", "launch",
    "cache", "devices",
)  # fmt: skip
METHODS = ("auto", "shard", "data", "zero2", "zero3", "pipeline")
PROFILE_PARTS = (
    "overheads", "memory", "products", "convolutions", "streams", "attentions", "collectives",
    "crossings",
)  # fmt: skip
SCHEDULES = ("gpipe", "1f1b", "1f1b_eager", "interleaved_1f1b", "zero_bubble", "inference")

_FACTORY = """\
FACTORY is FILE.py:FUNCTION or MODULE:FUNCTION. The function takes the options given by --set and
returns (step, args) or (step, args, kwargs); arguments may be jax.ShapeDtypeStructs. The file is
run as ordinary Python, without a sandbox.

CLUSTER is HOSTSxDEVICES:DEVICE, such as 50x4:v100-32gb (`autopar devices` lists devices), or the
path of a TOML file with the tables [cluster], [device] and [links]; see docs/simulation.md.
"""

_PROFILE = """\
Without --model, measures the machine: matrix products, convolutions, memory and links. Plans use
the resulting file: `autopar plan --profile FILE`, ClusterSpec(profile="FILE").
With --model, measures segments or strategies of a train step; FACTORY is as for `autopar plan`.
See docs/profiling.md.
"""
_BENCH = """\
Parts: cpu is measured on 8 virtual CPU devices; h100 is compiled for 8, 16 and 64 H100s, without
having any (pip install 'autopar[verify]'), and judged by XLA's programs; h200 and serving are
measured on one GPU, if there is one; scaling is predicted. Default: cpu, h100 and h200. Results are
kept in the folder, and an interrupted run continues there. See docs/benchmarks.md.
"""
_CACHE = """\
AUTOPAR_CACHE_DIR is the folder, by default autopar in the user's cache folder; an empty value turns
the cache off. See docs/howto/second_start.md.
"""
_DOCTOR = """\
Exit codes: 0 if autopar can plan and run here, 1 if something required is missing or broken.
Devices, Ray and solvers are checked in separate processes, each with a time limit. See
docs/doctor.md.
"""
_LAUNCH = """\
With fewer GPUs than ranks, several ranks share a GPU: this needs NCCL 2.30 or newer, and CUDA's MPS
daemon, which is started and ended. A plain jax.distributed.initialize() in the command joins the
ranks. See docs/howto/test_without_a_cluster.md.
"""
_EPILOGS = {
    "bench": _BENCH,
    "cache": _CACHE,
    "doctor": _DOCTOR,
    "launch": _LAUNCH,
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
    _add_demo(
        commands.add_parser(
            "demo", help="train a small model on one device and on all, and compare"
        )
    )
    _add_plan(_command(commands, "plan", "plan a train step for a cluster that need not exist"))
    _add_sweep(_command(commands, "sweep", "plan for several cluster and batch sizes, and compare"))
    _add_profile(_command(commands, "profile", "measure this machine, or a model's segments on it"))
    _add_bench(
        _command(
            commands, "bench", "compare plans with expert plans (needs a clone of the repository)"
        )
    )
    _add_report(_command(commands, "report", "write the HTML report of a saved plan"))
    _add_explain(_command(commands, "explain", "describe a saved plan"))
    _add_diff(_command(commands, "diff", "compare two saved plans"))
    _add_doctor(_command(commands, "doctor", "check the installation, and suggest fixes"))
    _add_launch(
        _command(commands, "launch", "run a command as several ranks on this host, even on one GPU")
    )
    _add_cache(_command(commands, "cache", "show the plans that are kept on disk"))
    _command(commands, "devices", "list known devices and their specifications")
    return parser


def check_command(parser: argparse.ArgumentParser, given: Sequence[str]) -> None:
    """A misspelt command is told with its neighbours; `argparse` has no such words."""
    if given and not given[0].startswith("-") and given[0] not in COMMANDS:
        parser.error(
            f"unknown command {given[0]!r}{near_names(given[0], COMMANDS)}; choose from "
            f"{', '.join(COMMANDS)}"
        )


def _command(commands, name: str, text: str) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_EPILOGS.get(name),
    )


def _add_demo(demo: argparse.ArgumentParser) -> None:
    demo.add_argument(
        "--model",
        choices=("gpt", "vit", "moe", "pipeline"),
        default="gpt",
        help="pipeline: the GPT in two stages (default gpt)",
    )
    demo.add_argument("--steps", type=_positive, default=30, help="training steps (default 30)")
    demo.add_argument(
        "--batch-size", type=_positive, default=16, help="sequences per step (default 16)"
    )
    demo.add_argument(
        "--platform",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help="auto: GPUs if there are any, else 8 virtual CPU devices",
    )
    demo.add_argument(
        "--cluster",
        choices=("local", "ray"),
        default="local",
        help="ray: a pipeline on a Ray cluster, which is started here if none runs",
    )


def _add_plan(plan: argparse.ArgumentParser) -> None:
    _add_step(plan)
    _add_micro_batches(plan)
    plan.add_argument("--batch", type=_positive, help="short for --set batch=…")
    plan.add_argument("--budget", metavar="BYTES", help="memory budget per device, such as 28GB")
    plan.add_argument("--save", metavar="FILE.json", help="save the plan")
    plan.add_argument("--report", metavar="FILE.html", help="write the plan's HTML report")
    plan.add_argument(
        "--baselines",
        action="store_true",
        help="with --report: show data parallelism, ZeRO-2, FSDP and Megatron beside the plan",
    )
    plan.add_argument("--depth", type=_positive, help="levels of modules to show")
    plan.add_argument("--full", action="store_true", help="print all that the plan says")
    plan.add_argument(
        "--why",
        action="append",
        default=[],
        metavar="PATH",
        help="explain the sharding of an array, such as \"state.params['Dense_0']['kernel']\"",
    )
    plan.add_argument("--quiet", action="store_true", help="print only the summary")
    plan.add_argument(
        "--verify",
        action="store_true",
        help="compile every stage for the target GPU, without having one (needs autopar[verify])",
    )
    plan.add_argument(
        "--target",
        metavar="GPU",
        help="with --verify: such as a100-40gb, or a description file; default: the device",
    )


def _add_sweep(sweep: argparse.ArgumentParser) -> None:
    _add_step(sweep)
    varied = sweep.add_argument_group("varied: lists such as 8,16,32, for one or two of these")
    varied.add_argument("--devices", metavar="LIST", help="numbers of devices")
    varied.add_argument("--batch", metavar="LIST", help="values of the factory's option `batch`")
    varied.add_argument("--micro-batches", metavar="LIST", help="numbers of micro-batches, or auto")
    varied.add_argument(
        "--budget", metavar="LIST", help="memory budgets per device, such as 20GB,40GB"
    )
    sweep.add_argument(
        "--price-per-hour",
        type=_price,
        metavar="PRICE",
        help="price of one device, in any currency",
    )
    sweep.add_argument("--html", metavar="FILE.html", help="write a page with plots")
    sweep.add_argument("--json", metavar="FILE.json", help="write all results")
    sweep.add_argument("--jobs", type=_positive, default=2, help="processes (default 2)")


def _add_profile(profile: argparse.ArgumentParser) -> None:
    profile.add_argument(
        "--show",
        metavar="FILE",
        help="show a measured profile: a file, or a built-in one such as h200",
    )
    machine = profile.add_argument_group("the machine")
    machine.add_argument(
        "--output",
        "-o",
        metavar="FILE",
        help="the profile to write; default: named after the device",
    )
    machine.add_argument("--quick", action="store_true", help="few samples, takes about a minute")
    machine.add_argument(
        "--only",
        metavar="LIST",
        help=f"some of {','.join(PROFILE_PARTS)}",
    )
    machine.add_argument(
        "--time",
        type=_seconds,
        metavar="SECONDS",
        help="stop after this time and keep what was measured",
    )
    machine.add_argument("--restart", action="store_true", help="discard an unfinished earlier run")
    machine.add_argument("--cluster", choices=("local", "ray"), default="local")
    machine.add_argument("--address", help="of a running Ray cluster; default: start one here")
    machine.add_argument("--hosts", type=_positive, metavar="N", help="hosts, with --cluster ray")
    machine.add_argument(
        "--devices",
        type=_positive,
        metavar="N",
        help="use the first N devices; with --cluster ray, per host",
    )
    machine.add_argument(
        "--ranks",
        type=_positive,
        metavar="N",
        help="start N processes here, with a GPU or a share of one each, and measure them together",
    )
    machine.add_argument("--nccl", metavar="FILE", help="for --ranks, as for `autopar launch`")
    machine.add_argument("--no-mps", action="store_true", help="for --ranks, likewise")
    machine.add_argument(
        "--platform",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help="auto: GPUs if there are any, else 8 virtual CPU devices",
    )
    _add_profile_of_model(profile)


def _add_profile_of_model(profile: argparse.ArgumentParser) -> None:
    model = profile.add_argument_group("a model's segments, or its strategies")
    model.add_argument("--model", metavar="FACTORY", help="my_train.py:make_step")
    _add_set(model)
    model.add_argument(
        "--mesh", metavar="SHAPE", help="mesh such as 8 or 2x4; default: all devices"
    )
    model.add_argument("--profile", metavar="FILE", help="a machine profile, for predictions")
    model.add_argument("--json", metavar="FILE", help="write all results")
    segments = profile.add_argument_group("segments of the step: analyse, time and search")
    segments.add_argument(
        "--passes", metavar="LIST", help="some of analysis,profile,search; default: all"
    )
    segments.add_argument("--folder", metavar="DIR", help="folder for the passes' files")
    segments.add_argument(
        "--top", type=_positive, metavar="K", help="strategy combinations per segment"
    )
    segments.add_argument("--jobs", type=_positive, metavar="N", help="compiling processes")
    segments.add_argument(
        "--check",
        type=_positive,
        metavar="K",
        help="time the K best plans as whole steps, keep the fastest",
    )
    strategies = profile.add_argument_group("strategies of the whole step: time and compare")
    strategies.add_argument(
        "--enumerate", action="store_true", help="time whole steps with different strategies"
    )
    strategies.add_argument(
        "--limit", type=_positive, metavar="N", help="at most N plans (default 24)"
    )
    timed = profile.add_argument_group("the database of timed plans")
    timed.add_argument("--database", action="store_true", help="list timed plans")
    timed.add_argument("--forget", action="store_true", help="clear the database")


def _add_bench(bench: argparse.ArgumentParser) -> None:
    bench.add_argument("--only", metavar="LIST", help="some of cpu,h100,h200,scaling,serving")
    bench.add_argument("--models", metavar="LIST", help="such as gpt,moe-10b; default: all")
    bench.add_argument("--devices", metavar="LIST", help="for h100: such as 8,64; default: all")
    bench.add_argument("--plans", metavar="A;B", help="for h100: autopar, FSDP and other families")
    bench.add_argument("--layers", type=_positive, metavar="N", help="use models of N layers")
    bench.add_argument(
        "--quick", action="store_true", help="few rows, two layers; takes some minutes"
    )
    bench.add_argument("--jobs", type=_positive, default=2, help="processes (default 2)")
    bench.add_argument("--time-limit", type=_seconds, default=3600.0, metavar="SECONDS")
    bench.add_argument(
        "--folder",
        default="autopar-bench",
        metavar="DIR",
        help="folder for results (default autopar-bench)",
    )
    bench.add_argument("--list", action="store_true", help="list the rows without running them")
    bench.add_argument("--show", metavar="FILE", help="show the tables of a results file")
    bench.add_argument("--merge-into", metavar="FILE", help="merge the results into this file")
    bench.add_argument(
        "--rewrite", metavar="TEXT.md", help="update the tables between the markers of this file"
    )


def _add_launch(launch: argparse.ArgumentParser) -> None:
    launch.add_argument("--ranks", type=_positive, required=True, help="number of processes")
    launch.add_argument(
        "--platform",
        choices=("gpu", "cpu"),
        help="default: gpu if the host has one, else cpu",
    )
    launch.add_argument(
        "--devices-per-rank", type=_positive, default=1, help="virtual CPU devices (default 1)"
    )
    launch.add_argument(
        "--nccl", metavar="FILE", help="a libnccl.so.2 from 2.30 on; default: the installed one"
    )
    launch.add_argument(
        "--no-mps", dest="mps", action="store_false", help="let ranks take turns on a shared GPU"
    )
    launch.add_argument("--time-limit", type=_seconds, metavar="SECONDS", help="end the ranks then")
    launch.add_argument("rank_command", nargs="+", metavar="COMMAND", help="what each rank runs")
    launch.usage = "autopar launch --ranks N [options] -- COMMAND …"


def _add_doctor(doctor: argparse.ArgumentParser) -> None:
    doctor.add_argument("--json", action="store_true", help="print JSON, for bug reports")
    doctor.add_argument(
        "--time-limit",
        type=_seconds,
        default=120.0,
        metavar="SECONDS",
        help="for each check (default 120)",
    )


def _add_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("factory", metavar="FACTORY", help="my_train.py:make_step")
    parser.add_argument("--cluster", required=True, help="such as 50x4:v100-32gb, or a TOML file")
    _add_set(parser)
    parser.add_argument(
        "--method",
        default=None,
        help=f"{', '.join(METHODS)}, or MODULE:OBJECT; default: the step's method, else auto",
    )
    parser.add_argument(
        "--stages", type=_positive, help="with --method pipeline: number of equal stages"
    )
    parser.add_argument("--layers", type=_positive, help="with --method pipeline: number of layers")
    parser.add_argument("--schedule", choices=SCHEDULES, help="with --method pipeline")
    parser.add_argument("--remat", choices=("auto", "none", "all"), help="recomputation of layers")
    parser.add_argument(
        "--batch-argnums",
        type=_positions,
        metavar="LIST",
        help="positions of arguments with a batch dimension",
    )
    parser.add_argument(
        "--profile",
        metavar="FILE",
        help="measured costs: a file by `autopar profile`, or a built-in profile such as h200",
    )
    parser.add_argument("--memory", metavar="BYTES", help="memory of a device, such as 32GB")
    parser.add_argument(
        "--intra-bandwidth",
        metavar="RATE",
        help="of a device's link inside a host, such as 300GB/s",
    )
    parser.add_argument(
        "--inter-bandwidth", metavar="RATE", help="of a host's network, such as 100Gb/s"
    )


def _add_set(parser: Any) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the factory; VALUE is JSON or plain text",
    )


def _add_micro_batches(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--micro-batches", type=_count_or_auto, metavar="N", help="number of micro-batches, or auto"
    )


def _add_report(report: argparse.ArgumentParser) -> None:
    report.add_argument("plan", metavar="PLAN.json")
    report.add_argument(
        "--output", "-o", metavar="FILE.html", help="default: the plan's path with .html"
    )
    report.add_argument(
        "--measured", metavar="TRACE.json", help="trace of a run, recorded by autopar.trace"
    )
    report.add_argument(
        "--compare",
        action="append",
        default=[],
        metavar="OTHER.json",
        help="another plan of the step, to show beside it; may be given several times",
    )


def _add_explain(explain: argparse.ArgumentParser) -> None:
    explain.add_argument("plan", metavar="PLAN.json")
    explain.add_argument("path", nargs="?", help="of an array, to explain its sharding")
    explain.add_argument("--depth", type=_positive, help="levels of modules to show")
    explain.add_argument("--full", action="store_true", help="all that the plan says, not a screen")


def _add_diff(diff: argparse.ArgumentParser) -> None:
    diff.add_argument("first", metavar="A.json")
    diff.add_argument("second", metavar="B.json")


def _add_cache(cache: argparse.ArgumentParser) -> None:
    cache.add_argument("--clear", action="store_true", help="remove all of them")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number ≥ 1")
    return int(text)


def _count_or_auto(text: str) -> int | str:
    return text if text == "auto" else _positive(text)


def _positions(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text} is not a list of positions such as 1 or 1,2")
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

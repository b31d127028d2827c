"""Plans of well-known models for 8 and 64 H100s as live report pages; writes docs/gallery.md.

    python -m benchmarks.gallery                     # pages that are missing, then the list of all
    python -m benchmarks.gallery --page gpt-39b-64   # these again
    python -m benchmarks.gallery --list              # only writes the list
    python -m benchmarks.gallery --jobs 4            # four at a time

Each plan is made by the default method, beside the baselines of `autopar plan --baselines`, in its
own process. Pages go to docs/gallery, what the list says of them to
benchmarks/results/gallery.json. Nothing is compiled or run; no GPU is needed.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.cli.baselines import MEGATRON, TITLES, baselines
from autopar.ir.text import format_seconds
from autopar.sharding.memory_budget import RESERVE_SHARE
from benchmarks.script import check_names, script_parser, write_json
from benchmarks.zoo.page import markdown_row, plan_in_short
from benchmarks.zoo.planning import promises, row_of_a_process, versions

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/gallery.json"
FOLDER = ROOT / "docs/gallery"
LIST = ROOT / "docs/gallery.md"
LIMIT_S = 1800.0
_LIMIT_BYTES = 80e9 * (1 - RESERVE_SHARE)
_NO_MEMORY = re.compile(r"\bfits\b|\bbudget\b")

INTRODUCTION = """# Gallery of plans

<!-- Written by `python -m benchmarks.gallery`: change that script, not this page. -->

What autopar chooses for well-known models on 8 and 64 H100s, 8 to a host, with everything
automatic. Each name opens the report page of the plan, as `plan.report("plan.html")` writes it: the
timeline by layer, how every array is split over the mesh, what limits the step, memory, and
baselines beside it. Nothing was compiled or run: steps are predictions from the data sheet, which
assume no overlap of communication with compute. A plan fits if it leaves a tenth of a device's
memory free; a baseline takes the fewest micro-batches that make it fit, or recomputes its layers,
whichever is faster. ZeRO-3 keeps the weights it has gathered until the backward pass; an FSDP that
gathers them twice fits where it does not.
"""


@dataclass(frozen=True)
class Entry:
    """A page. `make`: the step, and its arguments as shapes."""

    title: str
    devices: int
    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]


def entries() -> dict[str, Entry]:
    """By name of file. Imports JAX."""
    from benchmarks.planning_zoo.cases import CASES
    from examples.models import build

    def example(name: str, batch: int) -> Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]:
        def make() -> tuple[Callable[..., Any], tuple[Any, ...]]:
            built = build(name, batch)
            return built.train_step, (built.abstract_state(), built.abstract_batch())

        return make

    unet, recommender = CASES["U-Net (diffusion)"].make, CASES["DLRM"].make
    return {
        "gpt-2.6b-8": Entry("GPT-2.6B, batch 64", 8, example("gpt-2.6b", 64)),
        "gpt-39b-64": Entry("GPT-39B, batch 1024", 64, CASES["GPT-39B"].make),
        "llama3-8b-8": Entry("Llama3-8B, batch 16 × 8192", 8, example("llama3-8b", 16)),
        "llama-70b-64": Entry("Llama-70B, batch 512 × 4096", 64, CASES["Llama-70B"].make),
        "moe-10b-8": Entry("GShard MoE-10B, batch 1024", 8, CASES["MoE-10B"].make),
        "moe-70b-64": Entry("GShard MoE-70B, batch 1024", 64, CASES["MoE-70B"].make),
        "vit-l-8": Entry("ViT-L, batch 1024", 8, example("vit-304m", 1024)),
        "vit-22b-64": Entry("ViT-22B, batch 1024", 64, CASES["ViT-22B"].make),
        "unet-8": Entry("U-Net of a diffusion model", 8, unet),
        "unet-64": Entry("U-Net of a diffusion model", 64, unet),
        "dlrm-8": Entry("DLRM, 16 tables of 524,288 × 64", 8, recommender),
        "dlrm-64": Entry("DLRM, 16 tables of 524,288 × 64", 64, recommender),
    }


def write_plan(name: str, folder: Path) -> dict[str, Any]:
    """Writes one page; what the list says of it."""
    import autopar

    entry = entries()[name]
    step, args = entry.make()
    cluster = autopar.ClusterSpec(entry.devices // 8, 8, "h100-sxm")
    plan = autopar.plan(step, *args, cluster=cluster)
    others = baselines(
        plan, cluster, lambda method: autopar.plan(step, *args, cluster=cluster, method=method)
    )
    folder.mkdir(exist_ok=True)
    plan.report(folder / f"{name}.html", compare=others)
    return {
        "title": entry.title,
        "devices": entry.devices,
        **promises(plan),
        "others": {
            title: {"error": other} if isinstance(other, str) else promises(other)
            for title, other in others.items()
        },
        **versions(),
    }


def list_text(rows: dict[str, dict[str, Any]]) -> str:
    """docs/gallery.md."""
    titles = [*TITLES.values(), MEGATRON]
    lines = [INTRODUCTION, *markdown_row("model", "H100s", "plan", "step", "memory", *titles)]
    lines += markdown_row(*["---"] * (5 + len(titles)))
    for name, row in rows.items():
        lines += markdown_row(
            f"[{row['title']}](gallery/{name}.html)",
            str(row["devices"]),
            plan_in_short(row),
            format_seconds(row["step_s"]),
            f"{row['peak_gib']:.1f} GiB",
            *(_in_short(row["others"].get(title)) for title in titles),
        )
    about = sorted({f"JAX {row['jax']}, Python {row['python']}" for row in rows.values()})
    lines += ["", f"Made by `python -m benchmarks.gallery` with {' and '.join(about)}.", ""]
    return "\n".join(lines)


def _in_short(row: dict[str, Any] | None) -> str:
    """A baseline: its step and how it fits, or that it does not. None: not planned yet."""
    if row is None:
        return ""
    if "error" in row:
        return "does not fit" if _NO_MEMORY.search(row["error"]) else "no plan"
    if row["peak_gib"] * 2**30 > _LIMIT_BYTES:
        return "does not fit"
    micro = row["num_micro_batches"]
    cut = f", {micro} micro-batches" if micro > 1 else ""
    return format_seconds(row["step_s"]) + cut + (", recomputing" if row["remat_layers"] else "")


def main() -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    parser = script_parser(__doc__)
    parser.set_defaults(json=str(RESULTS))
    parser.add_argument("--page", nargs="+", metavar="NAME", help="only these, and anew")
    parser.add_argument("--folder", default=str(FOLDER), help="where pages go")
    parser.add_argument("--jobs", type=int, default=1, help="plans at a time")
    parser.add_argument("--list", action="store_true", help="only write docs/gallery.md")
    parser.add_argument("--one", metavar="NAME", help="write one page, and print its row")
    options = parser.parse_args()
    if options.one:
        warnings.simplefilter("ignore")
        print(json.dumps(write_plan(options.one, Path(options.folder))))
        return
    known = list(entries())
    check_names(parser, "--page", options.page or (), known)
    path = Path(options.json)
    rows: dict[str, Any] = json.loads(path.read_text())["rows"] if path.exists() else {}
    names = options.page or [name for name in known if name not in rows]

    def planned(name: str) -> tuple[str, dict[str, Any]]:
        given = ["--one", name, "--folder", options.folder]
        return name, row_of_a_process("benchmarks.gallery", given, LIMIT_S)

    with ThreadPoolExecutor(options.jobs) as pool:
        todo = [] if options.list else [pool.submit(planned, name) for name in names]
        for done in as_completed(todo):
            name, row = done.result()
            print(f"{name}: {row.get('error') or plan_in_short(row)}", flush=True)
            if "error" not in row:
                rows = {
                    one: {**rows, name: row}[one] for one in known if one in {**rows, name: row}
                }
                write_json(options.json, {"rows": rows})
    if path == RESULTS:
        LIST.write_text(list_text(rows))


if __name__ == "__main__":
    main()

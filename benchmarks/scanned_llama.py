"""Llama-70B on 64 H100s and Llama-405B on 512, scanned, written out and by hand.

    python -m benchmarks.scanned_llama                       # rows that are missing, then the page
    python -m benchmarks.scanned_llama --row 70b-scanned     # these again
    python -m benchmarks.scanned_llama --anew --jobs 12      # all of them, twelve at a time
    python -m benchmarks.scanned_llama --page                # only writes the page

The model is written as MaxText writes it: one `lax.scan` over stacked layers under
`jax.checkpoint`, which keeps nothing but the layers' inputs (`remat_policy: full`), grouped queries
and cuDNN's attention. `scanned` and `written-out` are planned by the default method, and once more
(`-free`) without `jax.checkpoint`, so that the planner decides what is recomputed. The other rows
are layouts that people write by hand: which layers are on which hosts, tensor parallelism inside a
host with sequence parallelism, FSDP or split moments over the other devices, in pipelines
micro-batches of a row per device, else the fewest that fit, layers recomputed or not. autopar adds
what follows from that, and prices all rows by one formula. Every row is planned in a process of its
own, with the default limit of 60 seconds, which are CPU seconds here, so that other load does not
matter. Nothing is compiled or run.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from autopar.sharding.memory_budget import RESERVE_SHARE
from benchmarks.script import check_names, script_parser, write_json
from benchmarks.zoo.page import markdown_row
from benchmarks.zoo.planning import promises, row_of_a_process, without_folders

RESULTS = Path(__file__).parent / "results/scanned_llama.json"
PAGE = Path(__file__).parents[1] / "docs/scanned_llama.md"
LIMIT_S = 1200.0
PER_HOST = 8


@dataclass(frozen=True)
class Model:
    title: str
    devices: int
    batch: int
    sizes: tuple[int, int, int, int, int]  # width, layers, heads, key heads, feed-forward
    length: int

    def example(self, *, scan: bool, remat: bool) -> Any:
        import jax.numpy as jnp

        from examples.models import llama

        config = llama.LlamaConfig(
            *self.sizes,
            seq_len=self.length,
            vocab_size=128256,
            rope_theta=500_000.0,
            dtype=jnp.bfloat16,
            attention="cudnn",
            remat=remat,
            scan_layers=scan,
        )
        return llama.example(config, self.batch)


@dataclass(frozen=True)
class ByHand:
    """stages × data × tensor devices. `fsdp`: parameters, too, are split over the data axis, and
    not only their moments. With one stage, layers are scanned."""

    stages: int
    tensor: int
    fsdp: bool
    remat: bool

    def data(self, model: Model) -> int:
        return model.devices // self.stages // self.tensor

    def numbers(self, model: Model) -> list[int]:
        """Numbers of micro-batches to try in turn. A pipeline has a row per device in each; with a
        single row, autopar could not tell the batch from other dimensions of size one."""
        most = model.batch // max(2, self.data(model))
        if self.stages > 1:
            return [most]
        return [n for n in (2**k for k in range(most.bit_length())) if n <= most]

    def title(self, model: Model) -> str:
        sizes = {"FSDP" if self.fsdp else "DP": self.data(model), "TP": self.tensor}
        sizes["PP"] = self.stages
        return " × ".join(f"{kind} {size}" for kind, size in sizes.items() if size > 1)


MODELS = {
    "70b": Model("Llama-70B", 64, 512, (8192, 80, 64, 8, 28672), 4096),
    "405b": Model("Llama-405B", 512, 1024, (16384, 126, 128, 8, 53248), 8192),
}
AUTOMATIC = {  # name -> (whether layers are scanned, whether the model says what is recomputed)
    "scanned": (True, True),
    "written-out": (False, True),
    "scanned-free": (True, False),
    "written-out-free": (False, False),
}
STAGES = {"70b": (2, 4, 8), "405b": (4, 8, 16)}


def by_hand(model: str) -> Iterator[tuple[str, ByHand]]:
    """Names and layouts."""
    for remat in (False, True):
        end = "-recomputed" if remat else ""
        yield "fsdp" + end, ByHand(1, 1, True, remat)
        yield "fsdp-tp8" + end, ByHand(1, 8, True, remat)
        for stages in STAGES[model]:
            yield f"tp8-pp{stages}" + end, ByHand(stages, 8, False, remat)
            split = ByHand(stages, 8, True, remat)
            if split.data(MODELS[model]) > 1:
                yield f"fsdp-tp8-pp{stages}" + end, split


def names() -> list[str]:
    return [
        f"{model}-{name}"
        for model in MODELS
        for name in (*AUTOMATIC, *(name for name, _ in by_hand(model)))
    ]


def plan_row(name: str) -> dict[str, Any]:
    import autopar
    from benchmarks.provenance import provenance

    key, _, kind = name.partition("-")
    model = MODELS[key]
    layout = dict(by_hand(key)).get(kind)
    about: dict[str, Any] = {"model": model.title, "devices": model.devices}
    if layout is None:
        scan, remat = AUTOMATIC[kind]
        ways = [(model.example(scan=scan, remat=remat), autopar.AutoParallel())]
    else:
        about |= {"layout": layout.title(model), "recomputed": layout.remat}
        ways = [_made_by_hand(model, layout, number) for number in layout.numbers(model)]
    found: dict[str, Any] = {}
    for example, method in ways:  # by hand on one mesh: the fewest micro-batches that fit
        found = _planned(model, example, method)
        if "error" not in found:
            break
    return {**about, **found, "made": provenance()}


def _planned(model: Model, example: Any, method: Any) -> dict[str, Any]:
    import autopar

    step, arguments = example.train_step, (example.abstract_state(), example.abstract_batch())
    cluster = autopar.ClusterSpec(model.devices // PER_HOST, PER_HOST, "h100-sxm")
    budget = cluster.spec.memory_bytes * (1 - RESERVE_SHARE)
    started, started_cpu = time.perf_counter(), time.process_time()
    try:
        with mock.patch.object(time, "monotonic", time.process_time):
            plan = autopar.plan(step, *arguments, cluster=cluster, method=method)
        found = {**promises(plan), "stopped": plan.solver.stopped}
        found["submeshes"] = [list(stage.submesh) for stage in plan.stages]
        if plan.estimated_peak_bytes > budget:
            found["error"] = f"needs {found['peak_gib']:.1f} GiB"
    except autopar.AutoparError as error:
        found = {"error": without_folders(f"{type(error).__name__}: {error}").splitlines()[0]}
    took = {"planned_s": time.perf_counter() - started, "cpu_s": time.process_time() - started_cpu}
    return {**took, **found}


def _made_by_hand(model: Model, layout: ByHand, num_micro_batches: int) -> tuple[Any, Any]:
    """The model with named values, and the method that says where they lie."""
    from jax.sharding import PartitionSpec as P

    import autopar
    from benchmarks.experts.pipelines import naming, pins

    scan, data = layout.stages == 1, layout.data(model)
    example = model.example(scan=scan, remat=scan and layout.remat)
    plain = example.family.make_train_step
    family = dataclasses.replace(example.family, make_train_step=lambda c: naming(plain(c)))
    example = dataclasses.replace(example, family=family)
    remat = "all" if layout.remat and not scan else "none"
    pinned = pins(example, split_parameters=layout.fsdp)
    if layout.tensor == 1:
        pinned |= {path: P(None, "x") for path in pinned if "['embed']" in path}
    options = autopar.ShardingOptions(pins=pinned, batch_axis="x", remat=remat)
    if scan:
        return example, autopar.ShardParallel((data, layout.tensor), num_micro_batches, options)
    stages = layout.stages
    hosts = model.devices // PER_HOST // stages
    method = autopar.PipeshardParallel(
        num_micro_batches,
        layers=autopar.AutoLayers(model.sizes[1]),
        stages=autopar.ManualStages(
            layers_of_stages(model.sizes[1], stages),
            [(hosts, PER_HOST)] * stages,
            [(data, layout.tensor)] * stages,
        ),
        options=options,
    )
    return example, method


def layers_of_stages(num_layers: int, num_stages: int) -> list[list[int]]:
    """Equally many layers for each stage; if they do not divide, the first and the last stage,
    which have the embedding and the head, have fewer, as in Llama 3's own pipelines."""
    each = -(-num_layers // num_stages)
    counts, missing = [each] * num_stages, num_stages * each - num_layers
    for index in range(missing):
        counts[-1 - index // 2 if index % 2 else index // 2] -= 1
    ends = [sum(counts[: k + 1]) for k in range(num_stages)]
    return [list(range(end - count, end)) for end, count in zip(ends, counts, strict=True)]


INTRODUCTION = """# Llama-70B and -405B, scanned

<!-- Written by `python -m benchmarks.scanned_llama`: change that script, not this page. -->

Llama-70B on 64 H100s, with a batch of 512 × 4,096 tokens, and Llama-405B on 512, with 1,024 ×
8,192, 8 GPUs to a host. The model is written as MaxText writes it: one `lax.scan` over stacked
layers under `jax.checkpoint`, which keeps the layers' inputs alone (`remat_policy: full`), grouped
queries, cuDNN's attention, bfloat16 compute with float32 parameters and Adam. Nothing was compiled
or run: steps and memory are predictions from the data sheet, by one formula for all rows, without
overlap of communication and compute. A plan may use 90 % of a GPU's memory, 67.1 GiB.

The first rows are planned by the default method: the scan, the same layers written out, and both
without `jax.checkpoint`, so that the planner decides what is recomputed. The others are written by
hand: FSDP over all GPUs, with tensor and sequence parallelism inside a host (TP 8), and pipelines
of equally many layers per stage (the first and last have one less where that does not divide, as
in Llama 3's own), with 1F1B and a micro-batch of one row per data-parallel GPU, two where there is
one such GPU. Without stages, the batch is cut into the fewest micro-batches that fit. Moments, with
FSDP parameters too, are split over the data-parallel GPUs. Layers are recomputed all or not at all.

The default method stops after 60 seconds. Its plans that are slower than one by hand were made
under that limit; `stopped` in `benchmarks/results/scanned_llama.json` says what was left out. How
much a second of a CPU does depends on the machine: rows made with JAX 0.12 come from two cores that
needed nearly twice the seconds of those before, beside other work.
"""


def page(rows: dict[str, dict[str, Any]]) -> str:
    lines = [INTRODUCTION]
    marks = _marks(rows)
    for key, model in MODELS.items():
        lines += [f"## {model.title} on {model.devices} H100s", ""]
        lines += markdown_row(
            "plan", "stages", "micro-batches", "recomputed", "memory", "step", "planned in"
        )
        lines += markdown_row(*["---"] * 7)
        for name, row in rows.items():
            kind = name.removeprefix(f"{key}-")
            if kind != name:
                title, *cells = _cells(kind, row)
                lines += markdown_row(title + marks[_made(row)], *cells)
        lines += ["", _verdict(key, rows), ""]
    made = "; ".join(f"{mark.strip()} {name}".strip() for name, mark in marks.items())
    lines.append(
        "Planning is in CPU seconds. Made by `python -m benchmarks.scanned_llama` at "
        f"{made} (+: and later changes)."
    )
    if len(marks) > 1:
        lines.append("Rows with different marks were planned by different planners and prices.")
    lines.append("")
    return "\n".join(lines)


def _made(row: dict[str, Any]) -> str:
    """By which commit, and with which JAX."""
    commit, jax_version = row["made"]["commit"], row["made"]["versions"]["jax"]
    return f"{commit[:8]}{'+' * commit.endswith('+')} with JAX {jax_version}"


def _marks(rows: dict[str, dict[str, Any]]) -> dict[str, str]:
    """What is written behind the names of rows that were made alike; nothing if all were."""
    made = sorted({_made(row) for row in rows.values()})
    letters = (f" <sup>{letter}</sup>" for letter in "abcdefgh")
    return {made[0]: ""} if len(made) == 1 else dict(zip(made, letters, strict=False))


def _verdict(key: str, rows: dict[str, dict[str, Any]]) -> str:
    """autopar beside the best layout by hand, with what the model recomputes and without."""
    fitting = {
        name.removeprefix(f"{key}-"): row
        for name, row in rows.items()
        if name.startswith(f"{key}-") and "error" not in row
    }
    said = []
    for title, kinds, recomputed in (
        ("All layers recomputed", ("scanned", "written-out"), (True,)),
        ("Recomputation left open", ("scanned-free", "written-out-free"), (True, False)),
    ):
        hand = [r for r in fitting.values() if "layout" in r and r["recomputed"] in recomputed]
        if not hand:
            continue
        best = min(hand, key=lambda row: row["step_s"])
        ours = ", ".join(
            f"{fitting[kind]['step_s'] / best['step_s']:.3f} of it "
            + ("scanned" if AUTOMATIC[kind][0] else "written out")
            for kind in kinds
            if kind in fitting
        )
        said.append(
            f"{title}: the best by hand is {best['layout']}, {best['step_s']:.2f} s; autopar takes "
            f"{ours}."
        )
    return " ".join(said)


def _cells(kind: str, row: dict[str, Any]) -> list[str]:
    if kind in AUTOMATIC:
        scan, given = AUTOMATIC[kind]
        title = "**autopar**, scanned" if scan else "**autopar**, written out"
        recomputed = "as the model says" if given else f"{row.get('remat_layers', 0)} layers"
    else:
        title, recomputed = row["layout"], "all layers" if row["recomputed"] else "nothing"
    took = f"{row['cpu_s']:.0f} s"
    if "error" in row:
        return [title, "", "", recomputed, "does not fit", "", took]
    meshes = [f"{'×'.join(map(str, mesh))}" for mesh in row["stages"] or [row["mesh"]]]
    alike = f"{len(meshes)} of " if len(meshes) > 1 else "1 of "
    stages = alike + meshes[0] if len(set(meshes)) == 1 else ", ".join(meshes)
    memory, step = f"{row['peak_gib']:.1f} GiB", f"{row['step_s']:.2f} s"
    return [title, stages, str(row["num_micro_batches"]), recomputed, memory, step, took]


def _row(name: str) -> dict[str, Any]:
    return row_of_a_process("benchmarks.scanned_llama", ["--one", name], LIMIT_S)


def main() -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    parser = script_parser(__doc__)
    parser.set_defaults(json=str(RESULTS))
    parser.add_argument("--row", nargs="+", metavar="NAME", help="only these, and anew")
    parser.add_argument("--anew", action="store_true", help="all rows, not only missing ones")
    parser.add_argument("--jobs", type=int, default=1, help="rows at a time")
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--one", metavar="NAME", help="plan one row, and print it")
    options = parser.parse_args()
    if options.one:
        warnings.simplefilter("ignore")
        print(json.dumps(plan_row(options.one)))
        return
    check_names(parser, "--row", options.row or (), names())
    path = Path(options.json)
    rows: dict[str, Any] = json.loads(path.read_text())["rows"] if path.exists() else {}
    todo = options.row or [name for name in names() if options.anew or name not in rows]
    with ThreadPoolExecutor(options.jobs) as pool:
        jobs = {pool.submit(_row, name): name for name in (() if options.page else todo)}
        for job in as_completed(jobs):
            name, row = jobs[job], job.result()
            said = row.get("error") or f"{row['step_s']:.2f} s, {row['peak_gib']:.1f} GiB"
            print(f"{name}: {said} ({row.get('cpu_s', 0):.0f} CPU s)", flush=True)
            rows[name] = row
            rows = {one: rows[one] for one in names() if one in rows}
            write_json(options.json, {"rows": rows})
    if path == RESULTS:
        PAGE.write_text(page(rows))


if __name__ == "__main__":
    main()

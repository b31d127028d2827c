"""The large models within 80 GB, verified by `autopar.verify`: predicted peaks against XLA's.

    python -m benchmarks.verify_table [--model gpt-2.6b …] [--devices 8 64] [--json FILE]
    python -m benchmarks.verify_table --show

Plans the models of `benchmarks.large_models` for 8 and 64 H100s and verifies each plan, as `autopar
plan … --verify` does. Rows are added to the file one by one (compiling takes minutes) and compared
with those of `results/large_models.json`, which another version of JAX planned and compiled. This
needs `jax[cuda13]` but no GPU.
"""

from __future__ import annotations

import json
import pathlib
import time
from typing import Any

import autopar
from autopar.measure.verify.report import VerifiedMesh
from benchmarks.large_models import GIB, SIZES, cluster_of, example_of, versions
from benchmarks.script import read_rows, script_parser, write_json

RESULTS = pathlib.Path(__file__).with_name("results")
DEFAULT = RESULTS / "verify_h100.json"
EARLIER = RESULTS / "large_models.json"


def verified_row(model: str, num_devices: int, num_layers: int | None) -> dict[str, Any]:
    example = example_of(model, num_devices, num_layers)
    arguments = (example.abstract_state(), example.abstract_batch())
    started = time.perf_counter()
    plan = autopar.plan(
        example.train_step,
        *arguments,
        cluster=cluster_of(num_devices),
        method=autopar.ShardParallel(),
    )
    planned_s = time.perf_counter() - started
    report = autopar.verify(example.train_step, *arguments, plan=plan)
    print(report, flush=True)
    (mesh,), (program,) = report.meshes, report.programs
    row = {
        "model": model,
        "devices": num_devices,
        "batch_size": example.batch_size,
        "mesh": list(plan.mesh_shape),
        "target": report.target,
        "remat_layers": len(plan.remat),
        "planned_s": planned_s,
        "verified_s": report.seconds,
        "compiled_s": program.figures.seconds,
        "predicted_peak_gib": plan.estimated_peak_bytes / GIB,
        "xla_peak_gib": mesh.peak_bytes.xla / GIB,
        "ratio": mesh.peak_bytes.ratio,
        "fits": report.fits,
        "left_gib": -report.excess_bytes / GIB,
        "dot_tflop": {
            "xla": mesh.dot_flops.xla / 1e12,
            "predicted": _scaled(mesh.dot_flops.predicted, 1e12),
        },
        **_sent(mesh),
        "versions": versions(),
    }
    return row if num_layers is None else {**row, "layers": num_layers}


def _sent(mesh: VerifiedMesh) -> dict[str, Any]:
    predicted = [one.sent_bytes.predicted for one in mesh.collectives]
    return {
        "sent_gb": {
            "xla": sum(one.sent_bytes.xla for one in mesh.collectives) / 1e9,
            "predicted": None if None in predicted else sum(p or 0 for p in predicted) / 1e9,
        },
        "collectives": {
            one.kind: {
                "xla": [one.count.xla, one.sent_bytes.xla / 1e9],
                "predicted": [one.count.predicted, _scaled(one.sent_bytes.predicted, 1e9)],
            }
            for one in mesh.collectives
        },
    }


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


def earlier_rows() -> dict[tuple[str, int], dict[str, Any]]:
    rows = json.loads(EARLIER.read_text())["rows"]
    return {(r["model"], r["devices"]): r for r in rows if r["plan"] == "autopar"}


def show(rows: list[dict[str, Any]]) -> None:
    heads = (
        "model", "GPUs", "mesh", "predicted GiB", "XLA GiB", "ratio", "fits", "sent GB, XLA",
        "predicted", "earlier: mesh", "predicted GiB", "XLA GiB", "ratio", "sent GB",
    )  # fmt: skip
    print("| " + " | ".join(heads) + " |\n" + "| --- " * len(heads) + "|")
    before = earlier_rows()
    for row in sorted(rows, key=lambda row: (list(SIZES).index(row["model"]), row["devices"])):
        old = before.get((row["model"], row["devices"]))
        sent = row["sent_gb"]
        cells = [
            row["model"],
            str(row["devices"]),
            "×".join(map(str, row["mesh"])),
            f"{row['predicted_peak_gib']:.1f}",
            f"{row['xla_peak_gib']:.1f}",
            f"{row['ratio']:.2f}",
            "yes" if row["fits"] else "no",
            f"{sent['xla']:.1f}",
            "–" if sent["predicted"] is None else f"{sent['predicted']:.1f}",
        ]
        if old is not None and "layers" not in row:
            cells += [
                "×".join(map(str, old["mesh"])),
                f"{old['predicted_peak_gib']:.1f}",
                f"{old['xla_peak_gib']:.1f}",
                f"{old['predicted_peak_gib'] / old['xla_peak_gib']:.2f}",
                f"{old['sent_gb']:.1f}",
            ]
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--model", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--devices", nargs="+", type=int, default=[8, 64])
    parser.add_argument("--layers", type=int, help="shallower models, for dry runs")
    parser.set_defaults(json=str(DEFAULT))
    parser.add_argument("--show", action="store_true", help="print the table of the file's rows")
    options = parser.parse_args()
    known = read_rows(options.json) or []
    if options.show:
        return show(known)
    for num_devices in options.devices:
        for model in options.model:
            row = verified_row(model, num_devices, options.layers)
            known = [r for r in known if (r["model"], r["devices"]) != (model, num_devices)]
            known.append(row)
            about = {"target": "H100 80GB, 8 to a host (compiled, not run)"}
            write_json(options.json, {**about, "rows": known})
    show(known)


if __name__ == "__main__":
    main()

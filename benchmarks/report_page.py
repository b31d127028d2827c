"""Size, write time and load time of a plan's report.

    python -m benchmarks.report_page [plan.json …] [--json FILE]

Without a file, it first plans GPT-39B for 64 H100s (no device needed; about a minute). Chromium
(`AUTOPAR_CHROMIUM`, or on the path) loads the page five times: `load_s` is the median time until
all sections are painted, `main_thread_s` the processor time of the page's main thread, which
depends less on other load.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import statistics
import tempfile
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import autopar
from benchmarks.pipeline_rows import machine
from benchmarks.script import script_parser
from benchmarks.stage_planning import CASES

CASE = "GPT-39B on 8×8"
LOADS = 5
READY = "html[data-ready=yes]"
PAINTED = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


def measure(name: str, plan: autopar.ParallelPlan, folder: pathlib.Path) -> dict[str, Any]:
    target = folder / "plan.html"
    started = time.perf_counter()
    plan.report(target)
    written_s = time.perf_counter() - started
    details = [(stage.plan or plan).details for stage in plan.stages]
    return {
        "plan": name,
        "devices": plan.num_devices,
        "stages": plan.num_stages,
        "operators": sum(len(own.ops) for own in details if own is not None),
        "events": len(plan.timeline().events),
        "bytes": target.stat().st_size,
        "written_s": written_s,
        **loaded(target),
        "load_average": os.getloadavg()[0],
    }


def loaded(page_file: pathlib.Path) -> dict[str, float]:
    from playwright.sync_api import sync_playwright

    browser_path = os.environ.get("AUTOPAR_CHROMIUM") or shutil.which("chromium")
    seconds, thread_s = [], []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=browser_path, args=["--headless", "--no-sandbox", "--disable-gpu"]
        )
        for _ in range(LOADS):
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            session = page.context.new_cdp_session(page)
            session.send("Performance.enable", {"timeDomain": "threadTicks"})
            started = time.perf_counter()
            page.goto(page_file.as_uri())
            page.wait_for_selector(READY)
            page.evaluate(PAINTED)
            seconds.append(time.perf_counter() - started)
            metrics = session.send("Performance.getMetrics")["metrics"]
            thread_s.append(next(m["value"] for m in metrics if m["name"] == "TaskDuration"))
            page.close()
        browser.close()
    return {"load_s": statistics.median(seconds), "main_thread_s": statistics.median(thread_s)}


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("plans", nargs="*", help="files written by plan.save()")
    arguments = parser.parse_args()
    plans = {pathlib.Path(p).stem: autopar.ParallelPlan.load(p) for p in arguments.plans}
    if not plans:
        example, cluster = CASES[CASE].example(), CASES[CASE].cluster()
        given = (example.abstract_state(), example.abstract_batch())
        plans = {CASE: autopar.plan(example.train_step, *given, cluster=cluster)}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, plan in plans.items():
            rows.append(measure(name, plan, pathlib.Path(folder)))
            print(json.dumps(rows[-1], ensure_ascii=False), flush=True)
    if arguments.json:
        text = json.dumps({"machine": machine(), "rows": rows}, indent=1, ensure_ascii=False)
        pathlib.Path(arguments.json).write_text(text + "\n")


if __name__ == "__main__":
    main()

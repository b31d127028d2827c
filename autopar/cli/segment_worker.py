"""A process that compiles programs of segments: from lines of JSON to lines of JSON.

A request and tasks come in, a line goes out for each. Compiled programs stay in the cache of the
request's folder."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from autopar.ir.codec import decode


def main(lines: TextIO, answers: TextIO) -> None:
    from autopar.cli.segments import SegmentRequest, step_of
    from autopar.measure.segments.files import load_analysis
    from autopar.measure.segments.passes import ANALYSIS, CACHE
    from autopar.measure.segments.profile import TimingTask, program_of_task
    from autopar.measure.segments.run import compilation_cache_in

    body = json.loads(lines.readline())
    options = body.pop("options")
    fields = {**body, "mesh": None if body["mesh"] is None else tuple(body["mesh"])}
    request = SegmentRequest(options=options, **fields)
    step, devices = step_of(request)
    folder = Path(request.folder)
    analysis = load_analysis(folder / ANALYSIS)
    with compilation_cache_in(folder / CACHE):
        for line in lines:
            task: TimingTask = decode(TimingTask, json.loads(line))
            started = time.perf_counter()
            answer: dict[str, Any] = {"combination": task.combination, "segment": task.segment}
            try:
                program_of_task(step, analysis, task, devices).memory_bytes()
            except Exception as error:  # the timing reports it
                answer["error"] = f"{type(error).__name__}: {error}"
            answer["seconds"] = time.perf_counter() - started
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(
            sys.stderr.fileno(), sys.stdout.fileno()
        )  # what the user's code prints is no answer
        main(sys.stdin, answers)

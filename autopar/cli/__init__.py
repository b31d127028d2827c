"""The commands of `autopar`: from the command line to an exit code.

`arguments` defines the command line. Every command has a module, imported when it runs.

Exit codes: 0 success; 1 the plan does not fit, or a check failed; 2 invalid input or a missing
package.
"""

from __future__ import annotations

import os
import sys
import traceback
from argparse import Namespace
from collections.abc import Sequence

from autopar._requirements import raise_if_missing
from autopar.cli.arguments import check_command, make_parser
from autopar.errors import AutoparError, FactoryError, MemoryBudgetError

OK, NOT_FITTING, WRONG_INPUT = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    given = sys.argv[1:] if argv is None else argv
    check_command(parser, given)
    return run(parser.parse_args(given))


def run(arguments: Namespace) -> int:
    """Run a command. Errors of autopar are printed without a traceback, errors of the user's code
    with that code's."""
    try:
        try:
            code = _run(arguments)
        except ImportError as error:
            raise_if_missing(error)
            raise
        sys.stdout.flush()
        return code
    except AutoparError as error:
        cause = error.__cause__
        if isinstance(error, FactoryError) and cause is not None and _needs_traceback(cause):
            traceback.print_exception(_without_our_frames(cause))
        print(f"autopar: {error}", file=sys.stderr)
        return NOT_FITTING if isinstance(error, MemoryBudgetError) else WRONG_INPUT
    except BrokenPipeError:  # the reader closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


def _run(arguments: Namespace) -> int:
    match arguments.command:
        case "demo":
            from autopar.cli.demo import run_demo

            agrees = run_demo(
                arguments.steps,
                arguments.batch_size,
                arguments.platform,
                arguments.cluster,
                arguments.model,
            )
            return OK if agrees else NOT_FITTING
        case "plan":
            from autopar.cli.plan import run_plan

            return run_plan(arguments)
        case "sweep":
            from autopar.cli.sweep import run_sweep

            return run_sweep(arguments)
        case "profile":
            from autopar.cli.profile import run_profile

            return run_profile(arguments)
        case "bench":
            from autopar.cli.bench import run_bench

            return run_bench(arguments)
        case "doctor":
            from autopar.cli.doctor import run_doctor

            return run_doctor(arguments)
        case "cache":
            from autopar.cli.cache import run_cache

            return run_cache(arguments)
        case "launch":
            from autopar.cli.launch import run_launch

            return run_launch(arguments)
        case _:
            from autopar.cli import show

            return show.COMMANDS[arguments.command](arguments)


def _needs_traceback(error: BaseException) -> bool:
    """Whether the user's code was running, and called something that failed: the line of an error
    that a factory raises itself is in the message, and errors of autopar explain themselves."""
    if isinstance(error, (AutoparError, SyntaxError)):
        return False
    return len(_frames(error)) > 1


def _frames(error: BaseException) -> list[str]:
    names = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return [name for name in names if "importlib" not in name and "autopar/cli/" not in name]


def _without_our_frames(error: BaseException) -> BaseException:
    at = error.__traceback__
    while at is not None and at.tb_next is not None and _is_ours(at.tb_frame.f_code.co_filename):
        at = at.tb_next
    return error.with_traceback(at)


def _is_ours(filename: str) -> bool:
    return "importlib" in filename or filename.replace("\\", "/").endswith(
        "autopar/cli/factories.py"
    )

"""Gives every test eight CPU devices, unless AUTOPAR_TEST_GPU asks for the real accelerator, and
sorts tests into tiers.

Unmarked tests run by default. `ci` marks tests that only `.ci/run` adds; `slow` tests have their
own command. A family of similar tests names its representatives:

    @pytest.mark.representatives("gpt-tiny")    # on a parametrized test: ids of its cases
    pytestmark = pytest.mark.representatives("test_tied_weights", "test_dropout[2]")

The others of that test or module are marked `ci`, or `slow` if named by `slow=(…)`.

JAX reads its environment variables once, so they are set here, before any test module imports it.
Plans are made, not read: the plan cache is off, and its own tests turn it on in folders of theirs.
They are made by one process: tests run side by side already.
"""

import gc
import os
import signal

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ["AUTOPAR_CACHE_DIR"] = ""
os.environ["AUTOPAR_PLANNING_PROCESSES"] = "1"
if not os.environ.get("AUTOPAR_TEST_GPU"):
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Compile time matters more than run time.
    os.environ["XLA_FLAGS"] = (
        "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    )
else:
    # This process computes small oracles; the GPU's memory is for the ranks it starts.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def pytest_addoption(parser):
    parser.addoption(
        "--no-skips",
        action="store_true",
        help="fail if a test is skipped, on a machine that has everything tests may need",
    )


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config, items):
    unseen = {}  # (location of the mark, mark) -> names that match no test
    for item in items:
        _, mark = next(item.iter_markers_with_node("representatives"), (None, None))
        if mark is None:
            continue
        names = {item.name, item.originalname}
        if hasattr(item, "callspec"):
            names.add(item.callspec.id)
        slow = mark.kwargs.get("slow", ())
        where = f"{item.nodeid.partition('::')[0]}: representatives{mark.args}"
        unseen[where] = unseen.get(where, {*mark.args, *slow}) - names
        if names.isdisjoint(mark.args):
            item.add_marker("ci" if names.isdisjoint(slow) else "slow")
    is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    stale = [f"{where}: no test {sorted(names)}" for where, names in unseen.items() if names]
    if stale and is_whole:
        raise pytest.UsageError("\n".join(stale))


def pytest_collection_finish():
    """Exempts the tests and their imports, which live to the end, from garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Gives each process a run of neighbouring tests, so that a file's fixtures are made once."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


def pytest_terminal_summary(terminalreporter, config):
    """With --no-skips, lists the skipped tests and fails the run."""
    skipped = terminalreporter.stats.get("skipped", [])
    if config.getoption("no_skips") and skipped:
        terminalreporter.section("skipped, and --no-skips forbids it", red=True)
        for report in skipped:
            terminalreporter.line(f"{report.nodeid}: {report.longrepr}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not session.config.getoption("no_skips"):
        return  # an xdist worker reports to its controller
    if reporter.stats.get("skipped") and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED

"""`autopar doctor`: checks the installation and prints `Section`s of facts and `Problem`s.

Versions come from the packages' metadata. Checks that run JAX, drivers, solvers or Ray are probes
in processes of their own, with a time limit: see `doctor_probes`.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from autopar import __version__
from autopar._requirements import (
    OLDEST_RAY,
    REQUIRED,
    STEPS,
    TESTED_RANGE,
    is_older,
    is_tested,
    untested_text,
)
from autopar.errors import ClusterError
from autopar.inspect.lines import counted
from autopar.ir.text import format_bytes
from autopar.runtime.ranks.guard import MPS_CONTROL
from autopar.runtime.ranks.shared_gpu import find_nccl

OK, BROKEN = 0, 1
_PROCESSES = 4
_KILL_LIMIT_S = 5.0
_LOG_LINES = 3
_OPTIONAL = (
    "jaxlib",
    "flax",
    "optax",
    "equinox",
    "ray",
    "flatbuffers",
    "orbax-checkpoint",
    "s3fs",
    "gcsfs",
    "cupy-cuda12x",
    "cupy-cuda13x",
)
_CUDA_PACKAGES = re.compile(r"jax-cuda|nvidia-(nccl|cudnn|cuda-runtime|cuda-nvcc)")
_OLDEST_DRIVER_OF_CUDA_13 = "580"
# A probe allocates little GPU memory, sends no usage statistics, and logs little.
_PROBE_VARIABLES = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
_NO_GPU = {
    "JAX_PLATFORMS": "cpu",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
_HOST_DEVICES = "--xla_force_host_platform_device_count"


@dataclass(frozen=True)
class Problem:
    """what:        the problem.
    remedy:      how to fix it.
    is_required: whether autopar cannot plan or run because of it.
    """

    what: str
    remedy: str
    is_required: bool = False


@dataclass
class Section:
    """Facts by name, in order, and the problems among them."""

    title: str
    facts: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


@dataclass(frozen=True)
class ProbeOutcome:
    """A probe's result, or its error."""

    result: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


Probe = Callable[[str], ProbeOutcome]


def run_doctor(arguments: Namespace) -> int:
    sections = examine(lambda name: run_probe(name, arguments.time_limit))
    problems = [problem for section in sections for problem in section.problems]
    can_run = not any(problem.is_required for problem in problems)
    if arguments.json:
        report = {
            "can_run": can_run,
            "facts": {section.title: section.facts for section in sections},
            "problems": [asdict(problem) for problem in problems],
        }
        print(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        print(_text(sections, problems, can_run))
    return OK if can_run else BROKEN


def examine(probe: Probe) -> list[Section]:
    """All sections. JAX is checked first: other probes need it."""
    internals = probe("internals")
    packages, by_jax = _packages(internals), ("devices", "compiler", "step")
    wanted = ["highs", "pulp"]
    wanted += ["ray"] if _version("ray") else []
    wanted += ["cupy"] if _cupy() else []
    if not internals.error:
        wanted += [name for name in by_jax if name != "compiler" or _plugins()]
    with ThreadPoolExecutor(_PROCESSES) as threads:
        outcomes = dict(zip(wanted, threads.map(probe, wanted), strict=True))
    sections = [
        _machine(),
        packages,
        _devices(outcomes.get("devices")),
        _solvers(outcomes["highs"], outcomes["pulp"]),
        _ray(outcomes.get("ray")),
        _cuda(outcomes),
        _internals(internals),
    ]
    is_broken = any(problem.is_required for section in sections for problem in section.problems)
    sections.insert(-1, _step(outcomes.get("step"), is_broken))
    return sections


def _machine() -> Section:
    facts = {
        "autopar": f"{__version__}, in {Path(__file__).parents[1]}",
        "Python": f"{platform.python_version()}, {sys.executable}",
        "system": f"{platform.system()} {platform.release()} on {platform.machine()}",
        "processors": f"{os.cpu_count()}, {format_bytes(_host_memory_bytes())} of memory",
    }
    variables = ("JAX_PLATFORMS", "XLA_FLAGS", "CUDA_VISIBLE_DEVICES", "RAY_ADDRESS")
    facts |= {name: os.environ[name] for name in variables if name in os.environ}
    return Section("machine", facts)


def _packages(internals: ProbeOutcome) -> Section:
    section = Section("packages")
    for name, requirement in REQUIRED.items():
        version = _version(name)
        section.facts[name] = version or "not installed"
        oldest = re.match(r".*>=([\d.]+)", requirement)
        if not version:
            section.problems.append(
                Problem(f"{name} is not installed.", f"pip install '{requirement}'", True)
            )
        elif name == "jax":
            _check_jax(section, internals, version)
        elif oldest and is_older(version, oldest[1]):
            section.problems.append(
                Problem(f"{name} {version} is too old.", f"pip install '{requirement}'")
            )
    section.facts |= {name: _version(name) or "not installed" for name in _OPTIONAL}
    return section


def _check_jax(section: Section, internals: ProbeOutcome, version: str) -> None:
    remedy = f"pip install '{REQUIRED['jax']}'"
    if internals.error:
        section.problems.append(
            Problem(f"JAX {version} cannot be imported. {internals.error}", remedy, True)
        )
        return
    version = internals.result["version"]
    section.facts["jax"] = f"{version}, tested: {TESTED_RANGE}"
    if not is_tested(version):
        what = untested_text(version).partition(" If ")[0]
        section.problems.append(Problem(what, remedy))


def _internals(internals: ProbeOutcome) -> Section:
    states = internals.result.get("internals", [])
    section = Section("JAX internals", {s["path"]: s["fault"] or "found" for s in states})
    missing = [s for s in states if s["fault"]]
    version = internals.result.get("version", "")
    for use in dict.fromkeys(s["use"] for s in missing):
        paths = ", ".join(s["path"] for s in missing if s["use"] == use)
        section.problems.append(
            Problem(
                f"JAX {version} has no {paths}, which autopar needs for {use}.",
                f"pip install '{REQUIRED['jax']}'; if it already matches, please report it",
                is_required=use == STEPS,
            )
        )
    return section


def _devices(outcome: ProbeOutcome | None) -> Section:
    section = Section("devices")
    if outcome is None:
        return section
    if outcome.error:
        section.problems.append(
            Problem(
                f"JAX finds no devices. {outcome.error}",
                "set JAX_PLATFORMS=cpu to run without accelerators; for GPUs, check `nvidia-smi`",
                is_required=True,
            )
        )
    kinds = Counter(
        (d["platform"], d["kind"], d["memory_bytes"]) for d in outcome.result.get("devices", ())
    )
    for (name, kind, memory), count in kinds.items():
        usable = f", {format_bytes(memory)} each for JAX" if memory else ""
        section.facts[name] = f"{count} × {kind}{usable}"
    return section


def _solvers(highs: ProbeOutcome, pulp: ProbeOutcome) -> Section:
    section = Section("solvers")
    section.facts["HiGHS"] = highs.error or f"{highs.result['version']}, works"
    if highs.error and _version("highspy"):  # if it is missing, the packages section says so
        section.problems.append(
            Problem(
                f"The solver HiGHS does not work. {highs.error}",
                f"pip install --force-reinstall '{REQUIRED['highspy']}'",
                is_required=True,
            )
        )
    section.facts["PuLP"] = pulp.error or ", ".join(pulp.result["solvers"]) or "none"
    if pulp.error and _version("pulp"):
        section.problems.append(
            Problem(
                f"PuLP does not work. {pulp.error}",
                f"pip install --force-reinstall '{REQUIRED['pulp']}'",
                is_required=True,
            )
        )
    return section


def _ray(outcome: ProbeOutcome | None) -> Section:
    section = Section("Ray")
    version = _version("ray")
    if outcome is None:
        section.facts["version"] = "not installed (for clusters: pip install 'autopar[ray]')"
        return section
    section.facts["version"] = version
    if is_older(version, OLDEST_RAY):
        section.problems.append(
            Problem(f"Ray {version} is too old.", f"pip install 'ray>={OLDEST_RAY}'")
        )
    if outcome.error:
        section.facts["cluster"] = outcome.error
        remedy = "pip install --force-reinstall 'autopar[ray]'"
        section.problems.append(Problem(f"Ray does not work. {outcome.error}", remedy))
        return section
    nodes, refused = outcome.result["nodes"], outcome.result["refused"]
    section.facts["cluster"] = refused or "; ".join(nodes) or "none running"
    if refused and "RAY_ADDRESS" in os.environ:
        section.problems.append(
            Problem(
                f"Cannot join Ray at RAY_ADDRESS={os.environ['RAY_ADDRESS']}. {refused}",
                "start the cluster (ray start --head), or unset RAY_ADDRESS",
            )
        )
    return section


def _cuda(outcomes: Mapping[str, ProbeOutcome]) -> Section:
    section = Section("CUDA")
    gpus, driver = _gpus()
    section.facts["GPUs"] = gpus
    section.facts |= {name: _version(name) for name in _distributions(_CUDA_PACKAGES)}
    devices = outcomes.get("devices", ProbeOutcome())
    versions = devices.result.get("versions", {})
    for name, parts in (("cuda", (1000, 10)), ("cudnn", (10000, 100)), ("driver", (1000, 10))):
        if name in versions:
            major, minor = parts
            number = int(versions[name])
            label = {"cuda": "CUDA", "cudnn": "cuDNN", "driver": "CUDA supported by the driver"}[
                name
            ]
            section.facts[label] = f"{number // major}.{number % major // minor}"
    if shutil.which("nvidia-smi") and not driver:
        remedy = "start or reinstall NVIDIA's driver until `nvidia-smi` lists the GPUs"
        section.problems.append(Problem(f"NVIDIA's driver does not work. {gpus}", remedy))
    if driver:
        section.facts["ranks on one GPU"] = _sharing()
    if driver and not devices.error:
        _check_plugin(section, driver, devices)
    if "cupy" in outcomes:
        cupy = outcomes["cupy"]
        section.facts["CuPy"] = (
            cupy.error or f"{cupy.result['version']}, NCCL {cupy.result['nccl']}"
        )
        if cupy.error and driver:
            remedy = f"pip install --force-reinstall 'autopar[{_extra(driver)}]'"
            section.problems.append(Problem(f"CuPy does not work. {cupy.error}", remedy))
    elif driver and _version("ray"):
        remedy = f"pip install 'autopar[{_extra(driver)}]'"
        what = "CuPy is not installed; transfers between workers are slower without it."
        section.problems.append(Problem(what, remedy))
    compiler = outcomes.get("compiler")
    if compiler is None:
        compiles = "not installed (to verify plans: pip install 'autopar[verify]')"
    else:
        compiles = compiler.error or "compiles for an H100"
        if compiler.error:
            section.problems.append(
                Problem(
                    f"XLA's GPU compiler, for autopar.verify, does not work. {compiler.error}",
                    "pip install --force-reinstall 'autopar[verify]'",
                )
            )
    section.facts["GPU compiler"] = compiles
    return section


def _sharing() -> str:
    """Whether `autopar launch` can run several ranks on one GPU."""
    try:
        _, version = find_nccl()
    except ClusterError as error:
        return f"no. {error}"
    if shutil.which(MPS_CONTROL) is None:
        return f"NCCL {version}, taking turns: {MPS_CONTROL} is not on PATH"
    return f"NCCL {version}, side by side by MPS"


def _check_plugin(section: Section, driver: str, devices: ProbeOutcome) -> None:
    """Add a problem if JAX does not use the driver's GPUs."""
    if any(device["platform"] == "gpu" for device in devices.result.get("devices", ())):
        return
    extra = _extra(driver)
    if not _plugins():
        section.problems.append(
            Problem(
                "This machine has GPUs, but JAX has no CUDA plugin.",
                f"pip install 'autopar[{extra}]'",
            )
        )
    elif wrong := [f"{n} {_version(n)}" for n in _plugins() if _version(n) != _version("jaxlib")]:
        section.problems.append(
            Problem(
                f"{', '.join(wrong)} does not match jaxlib {_version('jaxlib')}: JAX ignores it.",
                f"pip install --upgrade 'autopar[{extra}]'",
            )
        )
    else:
        section.problems.append(
            Problem(
                "This machine has GPUs, but JAX does not use them.",
                "unset JAX_PLATFORMS and CUDA_VISIBLE_DEVICES, then look at the error of "
                "`JAX_PLATFORMS=cuda python -c 'import jax; jax.devices()'`",
            )
        )


def _step(outcome: ProbeOutcome | None, is_broken: bool) -> Section:
    section = Section("train step")
    if outcome is None:
        return section
    section.facts["planned and run"] = (
        outcome.error or f"matches jax.jit on {counted(outcome.result['devices'], 'device')}"
    )
    if outcome.error and not is_broken:  # otherwise another problem explains it
        section.problems.append(
            Problem(
                f"A small train step cannot be planned and run. {outcome.error}",
                "please report it with this output",
                is_required=True,
            )
        )
    return section


# -- what is installed


def _version(package: str) -> str:
    """The version of an installed distribution; empty if there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _distributions(pattern: re.Pattern[str]) -> list[str]:
    names = ((d.metadata["Name"] or "").lower().replace("_", "-") for d in metadata.distributions())
    return sorted({name for name in names if pattern.match(name)})


def _plugins() -> list[str]:
    return _distributions(re.compile(r"jax-cuda\d+-plugin$"))


def _cupy() -> list[str]:
    return _distributions(re.compile(r"cupy(-cuda\d+x)?$"))


def _gpus() -> tuple[str, str]:
    """The GPUs that NVIDIA's driver lists, as text, and its version, which may be empty."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return "no NVIDIA driver", ""
    fields = "--query-gpu=name,memory.total,driver_version"
    ended = _run([command, fields, "--format=csv,noheader"], dict(os.environ), 20.0)
    if ended is None or ended[0] != 0 or not ended[1].strip():
        reason = "timed out" if ended is None else " ".join(ended[1].split()) or "finds none"
        return f"nvidia-smi: {reason}", ""
    kinds = Counter(tuple(x.strip() for x in line.split(",")) for line in ended[1].splitlines())
    lines = [f"{count} × {', '.join(kind[:2])}" for kind, count in kinds.items()]
    driver = next(iter(kinds))[-1]
    return f"{'; '.join(lines)}; driver {driver}", driver


def _extra(driver: str) -> str:
    return "cuda12" if is_older(driver, _OLDEST_DRIVER_OF_CUDA_13) else "cuda13"


def _host_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# -- processes


def run_probe(name: str, time_limit_s: float) -> ProbeOutcome:
    """The outcome of a probe, in a process with a time limit."""
    with tempfile.TemporaryDirectory(prefix="autopar-doctor-", ignore_cleanup_errors=True) as made:
        file = Path(made) / "found.json"
        # -P: modules in the current folder do not shadow packages.
        command = [sys.executable, "-P", "-m", "autopar.cli.doctor_probes", name, str(file)]
        ended = _run(command, _environment(name), time_limit_s)
        if ended is None:
            return ProbeOutcome(error=f"No answer within {time_limit_s:g} s.")
        if not file.is_file():
            log = " | ".join(ended[1].splitlines()[-_LOG_LINES:])
            return ProbeOutcome(error=f"The check ended with status {ended[0]}. {log}")
        result = json.loads(file.read_text(encoding="utf-8"))
    return ProbeOutcome(error=result["error"]) if "error" in result else ProbeOutcome(result)


def _environment(name: str) -> dict[str, str]:
    """This process's environment with this autopar; for steps, with eight CPU devices."""
    path = os.environ.get("PYTHONPATH")
    package = str(Path(__file__).parents[2])
    variables = {
        **os.environ,
        "AUTOPAR_CACHE_DIR": "",  # plan, do not read a plan
        **_PROBE_VARIABLES,
        "PYTHONPATH": f"{package}{os.pathsep}{path}" if path else package,
        **(_NO_GPU if name == "compiler" else {}),
    }
    flags = variables.get("XLA_FLAGS", "")
    if name == "step" and _HOST_DEVICES not in flags:
        variables["XLA_FLAGS"] = f"{flags} {_HOST_DEVICES}=8".strip()
    return variables


def _run(
    command: list[str], environment: dict[str, str], time_limit_s: float
) -> tuple[int, str] | None:
    """Exit status and output of a command; None if it takes too long. Its process group is killed.
    A process that cannot be killed, because its driver hangs, is left behind."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(time_limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILL_LIMIT_S)
        log.seek(0)
        return status, log.read()


def _text(sections: list[Section], problems: list[Problem], can_run: bool) -> str:
    lines = []
    for section in sections:
        lines += [section.title]
        width = max(map(len, section.facts), default=0)
        lines += [f"  {name.ljust(width)}  {value}" for name, value in section.facts.items()]
        lines += ["  unknown"] * (not section.facts) + [""]
    if problems:
        lines += ["problems"]
        for number, problem in enumerate(problems, 1):
            needed = " (required)" if problem.is_required else ""
            lines += [f"  {number}. {problem.what}{needed}", f"     {problem.remedy}"]
        lines += [""]
    verb = "can" if can_run else "cannot"
    lines += [f"autopar {verb} plan and run on this machine."]
    return "\n".join(lines)

"""A judge of compiled programs: from XLA's optimized, scheduled HLO to seconds.

It reads what will run and knows nothing of the planner. A device has one stream of kernels and one
of collectives; instructions start in XLA's order. A kernel takes what its products, its arithmetic
and its traffic take (`autopar.measure.judge_kernels`). An array that was used a short while ago is
still in the device's cache. An asynchronous collective runs from its start beside the kernels,
after the collective before it, and its done waits for it. A loop runs its body as often as XLA
says, or the user by `autopar.expected_trips`; a trip of several kernels is a CUDA graph, in which
they start sooner. Of a shorter one, the host starts every kernel, ahead of the device: a step takes
at least as long as that.

What it does not see: kernels that share the device with each other or with a collective.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from autopar.errors import ArgumentError
from autopar.ir.devices import DeviceSpec
from autopar.ir.mesh import ClusterSpec
from autopar.measure.judge_kernels import GRAPH_LAUNCH_S, LAUNCH_S, work_of
from autopar.measure.judge_kernels import seconds as kernel_seconds
from autopar.measure.judge_traffic import CACHE_BYTES, Work
from autopar.runtime.hlo import CollectiveOp, read_collective
from autopar.runtime.hlo_text import HloModule, Instruction
from autopar.tracer.while_trips import expectations

_FREE = frozenset(
    (
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
        *("partition-id", "replica-id", "opt-barrier", "add-dependency", "domain"),
    )
)
_COLLECTIVES = frozenset(
    (
        *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
        *("collective-permute", "collective-broadcast"),
    )
)
_INDEX = re.compile(r"\bindex=(\d+)")

TRIP_S = 1e-6  # more for a trip that is a CUDA graph
HOST_TRIP_S = 4.7e-6  # the host's time to start such a graph
HOST_LAUNCH_S = 4.2e-6  # the host's time to start a kernel of a trip that is none
GRAPH_COMMANDS = 5  # from which on XLA makes a trip a CUDA graph; an asynchronous pair counts twice

Buffer = tuple[str, int]  # an instruction, or a loop's body, and which of its arrays


@dataclass(frozen=True)
class Kernel:
    """Some equal kernels of a step: all `count` together take `seconds`."""

    name: str
    op_name: str
    count: int
    seconds: float
    flops: float
    num_bytes: float


@dataclass(frozen=True)
class LinkUse:
    """All collectives of a kind in a place ("8 in a host", "4 hosts × 2"), for one device."""

    kind: str
    place: str
    count: int
    sent_bytes: float
    seconds: float


@dataclass(frozen=True)
class Judgement:
    """A step on one device.

    step_s:      from the first kernel to the end of the last.
    compute_s:   all kernels.
    links_s:     all collectives, as if nothing hid them.
    exposed_s:   the part of them for which kernels wait.
    flops:       of all products and convolutions.
    links:       collectives by kind and place.
    kernels:     the longest first.
    unknown_loops: names of loops whose trips neither XLA knows nor the user says; they count once.

    The branches of a conditional are equally likely: times and counts are the mean, counts rounded
    up.
    """

    step_s: float
    compute_s: float
    links_s: float
    exposed_s: float
    flops: float = 0.0
    links: tuple[LinkUse, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    unknown_loops: tuple[str, ...] = ()

    @property
    def hidden_s(self) -> float:
        """The part of the collectives that runs beside kernels."""
        return self.links_s - self.exposed_s


def judge(
    hlo_text: str, cluster: ClusterSpec | DeviceSpec | str, hosts: Sequence[int] | None = None
) -> Judgement:
    """The time of a program that XLA has compiled (`compiled.as_text()`), on devices of this kind.
    A device alone, or its name, stands for a cluster of one host. `hosts`: the host of every
    device, in the program's order; by default devices fill one host after another."""
    module = HloModule(hlo_text)
    if not module.is_scheduled or not module.entry:
        raise ArgumentError(
            "judge(hlo_text): needs a scheduled module, as compiled.as_text() gives it for GPUs; "
            "this text is not scheduled."
        )
    if not isinstance(cluster, ClusterSpec):
        cluster = ClusterSpec(1, max(module.num_devices, 1), device=cluster)
    return _Judge(module, cluster, hosts).judge()


@dataclass
class _Streams:
    """Two streams: when each is free."""

    kernels: float = 0.0
    links: float = 0.0
    exposed: float = 0.0
    ends: dict[str, float] = field(default_factory=dict)  # of collectives under way, by start

    def wait(self, until: float) -> None:
        self.exposed += max(0.0, until - self.kernels)
        self.kernels = max(self.kernels, until)


@dataclass
class _Sums:
    """What ran, by instruction."""

    compute: float = 0.0
    links: float = 0.0
    flops: float = 0.0
    kernels: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    uses: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def add_collective(self, op: CollectiveOp, place: str, seconds: float, times: float) -> None:
        if not times:
            return
        self.links += times * seconds
        sums = self.uses.setdefault((op.kind, place), [0, 0.0, 0.0])
        for number, value in enumerate((1, op.sent_bytes / op.trips, seconds)):
            sums[number] += times * value


class _Judge:
    def __init__(
        self, module: HloModule, cluster: ClusterSpec, hosts: Sequence[int] | None
    ) -> None:
        self.module = module
        self.cluster = cluster
        self.hosts = hosts
        self.device = cluster.spec
        self.sums = _Sums()
        self.cache = _Cache()
        self.works: dict[tuple[str, str], Work] = {}
        self.unknown_loops: list[str] = []
        self.launch_s = LAUNCH_S
        self.host_launch_s = 0.0
        self.host_s = 0.0
        self.num_expected = 0  # trips that the user says of the loops around this place

    def judge(self) -> Judgement:
        clock = self._run(self.module.entry, 1)
        kernels = [
            Kernel(name, op_name, ceil(count - 1e-6), seconds, flops, num_bytes)
            for (name, op_name), (count, seconds, flops, num_bytes) in self.sums.kernels.items()
            if count
        ]
        return Judgement(
            max(clock.kernels, clock.links, self.host_s),
            self.sums.compute,
            self.sums.links,
            clock.exposed + max(0.0, clock.links - clock.kernels),
            self.sums.flops,
            tuple(
                LinkUse(kind, place, ceil(count - 1e-6), sent, seconds)
                for (kind, place), (count, sent, seconds) in sorted(self.sums.uses.items())
            ),
            tuple(sorted(kernels, key=lambda kernel: -kernel.seconds)),
            tuple(dict.fromkeys(self.unknown_loops)),
        )

    def _run(self, computation: str, times: float) -> _Streams:
        """A computation from idle streams; `times`: how often it runs, for the sums."""
        clock = _Streams()
        listed = self.module.computations[computation]
        by_name = {one.name: one for one in listed}
        for one in listed:
            self._start(one, by_name, clock, times)
        clock.wait(max(clock.ends.values(), default=0.0))
        return clock

    def _start(
        self, one: Instruction, by_name: Mapping[str, Instruction], clock: _Streams, times: float
    ) -> None:
        if one.opcode in _FREE:
            return
        if one.opcode.endswith("-done"):
            clock.wait(clock.ends.pop(_start_of(one, by_name), 0.0))
        elif one.opcode.endswith("-update"):
            return
        elif collective := self._collective(one):
            seconds = 0.0
            if collective.group_size > 1:
                place, seconds = collective_s(collective, self.cluster, self.hosts)
                self.sums.add_collective(collective, place, seconds, times)
            begin = max(clock.links, clock.kernels)
            clock.links = begin + seconds
            if one.opcode.endswith("-start"):
                clock.ends[one.name] = clock.links
            else:
                clock.wait(clock.links)
        elif one.opcode == "while":
            self._loop(one, clock, times)
        elif one.opcode == "conditional":
            self._branches(one, clock, times)
        elif one.opcode in ("call", "async-start", "call-start"):
            for name in one.called:
                self._inline(self._run(name, times), clock, 1)
        else:
            self._kernel(one, by_name, clock, times)

    def _branches(self, one: Instruction, clock: _Streams, times: float) -> None:
        """Each finds the cache as it was before."""
        sizes, share = dict(self.cache.sizes), 1 / len(one.called)
        for branch in one.called:
            self.cache = _Cache(sizes)
            self._inline(self._run(branch, times * share), clock, share)

    def _collective(self, one: Instruction) -> CollectiveOp | None:
        if one.kind in _COLLECTIVES:
            return read_collective(one, self.module)
        if one.opcode == "async-start":
            for name in one.called:
                for inner in self.module.computations.get(name, ()):
                    if inner.kind in _COLLECTIVES:
                        return read_collective(inner, self.module)
        return None

    def _loop(self, one: Instruction, clock: _Streams, times: float) -> None:
        trips, expected = one.trips, expectations(one.op_name)
        if trips is None and len(expected) > self.num_expected:
            trips = expected[-1]
        elif trips is None:
            self.unknown_loops.append(one.name)
            trips = 1
        outside = self.launch_s, self.host_launch_s
        num_expected, self.num_expected = self.num_expected, len(expected)
        for name in one.called:
            self.launch_s, self.host_launch_s = self._launches(name)
            if trips > 1:  # the cache as the trip before leaves it
                self._run(name, 0)
                self._carry(name)
            inner = self._run(name, times * trips)
            if self.launch_s == GRAPH_LAUNCH_S:
                inner.kernels += TRIP_S
                self.host_s += times * trips * HOST_TRIP_S
            self._inline(inner, clock, trips)
            self._carry(name)
        self.launch_s, self.host_launch_s = outside
        self.num_expected = num_expected

    def _launches(self, body: str) -> tuple[float, float]:
        """Seconds to start a kernel of a loop's body, on the device and on the host."""
        listed = self.module.computations[body]
        if any(one.opcode in ("while", "conditional") for one in listed):
            return LAUNCH_S, 0.0
        num_commands = sum(one.opcode not in _FREE for one in listed)
        return (
            (GRAPH_LAUNCH_S, 0.0) if num_commands >= GRAPH_COMMANDS else (LAUNCH_S, HOST_LAUNCH_S)
        )

    def _carry(self, body: str) -> None:
        """What a loop's body returns is what it is given next."""
        listed = self.module.computations[body]
        by_name = {one.name: one for one in listed}
        root = next(one for one in listed if one.is_root)
        if root.opcode == "tuple":
            names = {_buffer(n, by_name): (body, i) for i, n in enumerate(root.operands)}
            self.cache.rename(names)

    def _inline(self, inner: _Streams, clock: _Streams, times: float) -> None:
        begin = max(clock.kernels, clock.links if inner.links else 0.0)
        clock.wait(begin)
        clock.kernels = begin + times * max(inner.kernels, inner.links)
        clock.exposed += times * inner.exposed
        if inner.links:
            clock.links = clock.kernels

    def _kernel(
        self, one: Instruction, by_name: Mapping[str, Instruction], clock: _Streams, times: float
    ) -> None:
        if (one.computation, one.name) not in self.works:
            work = work_of(one, self.module, by_name, self.device)
            self.works[one.computation, one.name] = work
        work = self.works[one.computation, one.name]
        cached = self._cached_bytes(one, work, by_name)
        seconds = kernel_seconds(work, cached, self.device, self.launch_s)
        flops, num_bytes = work.flops, work.num_bytes
        clock.kernels += seconds
        self.host_s += times * self.host_launch_s
        self.sums.compute += times * seconds
        self.sums.flops += times * flops
        sums = self.sums.kernels.setdefault((one.name, one.op_name), [0.0] * 4)
        for place, value in enumerate((1.0, seconds, flops, num_bytes)):
            sums[place] += times * value

    def _cached_bytes(
        self, one: Instruction, work: Work, by_name: Mapping[str, Instruction]
    ) -> float:
        """The part of a kernel's traffic that the cache holds. What it reads or writes as a whole
        is there afterwards."""
        found = 0.0
        for name, touched in work.reads.items():
            size = sum(array.num_bytes for array in by_name[name].results)
            if touched >= size:
                found += touched if self.cache.use(_buffer(name, by_name), size) else 0.0
        if work.written >= sum(array.num_bytes for array in one.results):
            for place, array in enumerate(one.results):
                is_there = self.cache.use((one.name, place), array.num_bytes)
                found += array.num_bytes if is_there else 0.0
        return found


class _Cache:
    """The arrays that a device used last, up to `CACHE_BYTES`."""

    def __init__(self, sizes: Mapping[Buffer, float] | None = None) -> None:
        self.sizes = dict(sizes or {})  # the one used last is the last
        self.total = sum(self.sizes.values())

    def use(self, buffer: Buffer, size: float) -> bool:
        """Whether it is there; it is then."""
        before = self.sizes.pop(buffer, None)
        self.sizes[buffer] = size
        self.total += size - (before or 0.0)
        while self.total > CACHE_BYTES:
            self.total -= self.sizes.pop(next(iter(self.sizes)))
        return before is not None

    def rename(self, names: Mapping[Buffer, Buffer]) -> None:
        self.sizes = {names.get(buffer, buffer): size for buffer, size in self.sizes.items()}
        self.total = sum(self.sizes.values())


def _buffer(name: str, by_name: Mapping[str, Instruction]) -> Buffer:
    """The array behind views. A loop's body knows those that it is given by their places."""
    place = 0
    while (one := by_name.get(name)) is not None:
        if one.opcode == "get-tuple-element":
            place = int(_INDEX.findall(one.attributes)[0])
            source = by_name[one.operands[0]]
            if source.opcode == "parameter":
                return one.computation, place
            name = source.operands[place] if source.opcode == "tuple" else source.name
            if source.opcode != "tuple":
                break
            place = 0
        elif one.opcode == "bitcast":
            name = one.operands[0]
        else:
            break
    return name, place


def _start_of(done: Instruction, by_name: Mapping[str, Instruction]) -> str:
    """The start of an asynchronous pair, through its updates."""
    name = done.operands[0]
    while name in by_name and by_name[name].opcode.endswith("-update"):
        name = by_name[name].operands[0]
    return name


def collective_s(
    op: CollectiveOp, cluster: ClusterSpec, hosts: Sequence[int] | None = None
) -> tuple[str, float]:
    """Where one run of a collective happens ("8 in a host", "4 hosts × 2"), and its seconds. Groups
    work side by side, so the slowest counts. `hosts`: of every device, in the program's order; by
    default devices fill one host after another.

    A ring inside a host has the bandwidth of a device's link. One through several hosts has that of
    the adapters of its devices on a host together, at most that of the link. An all-to-all sends
    its bytes for other hosts through the device's adapter and the rest over the link meanwhile; a
    permutation is as fast as its slowest pair."""
    device, per_host = cluster.spec, cluster.devices_per_host

    def hosts_of(group: Sequence[int]) -> list[int]:
        return [d // per_host if hosts is None else hosts[d] for d in group]

    placed = [Counter(hosts_of(group)) for group in op.groups] or [Counter([0] * op.group_size)]
    if op.kind == "collective-permute":
        crosses = any(len(pair) > 1 for pair in placed)
        bandwidth = device.host_bandwidth / per_host if crosses else device.intra_host_bandwidth
        place = "pairs across hosts" if crosses else "pairs in a host"
        return place, _alpha_s(crosses, device) + op.num_bytes / bandwidth
    times = {
        (len(group), min(group.values())): _group_s(op, group, device, per_host) for group in placed
    }
    (num_hosts, on_host), slowest_s = max(times.items(), key=lambda item: item[1])
    place = f"{on_host} in a host" if num_hosts == 1 else f"{num_hosts} hosts × {on_host}"
    return place, slowest_s


def _group_s(op: CollectiveOp, group: Counter[int], device: DeviceSpec, per_host: int) -> float:
    """`group`: how many of its devices are on each of its hosts."""
    link, adapter = device.intra_host_bandwidth, device.host_bandwidth / per_host
    crosses, on_host = len(group) > 1, min(group.values())
    alpha_s, sent = _alpha_s(crosses, device), op.sent_bytes / op.trips
    if not crosses:
        return alpha_s + sent / link
    if op.kind in ("all-to-all", "ragged-all-to-all"):
        num_devices = sum(group.values())
        away = (num_devices - on_host) / num_devices * op.num_bytes
        return alpha_s + max(away / adapter, (sent - away) / link)
    return alpha_s + sent / min(on_host * adapter, link)


def _alpha_s(crosses: bool, device: DeviceSpec) -> float:
    return device.inter_host_alpha_s if crosses else device.intra_host_alpha_s

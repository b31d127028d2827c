"""A judge of compiled programs: from XLA's optimized, scheduled HLO to seconds.

It reads what will run and knows nothing of the planner. A device has one stream of kernels and one
of collectives; instructions start in XLA's order. A kernel takes as long as the slower of its
matrix products (at `PRODUCTS` of the peak rate) and its traffic (at `MEMORY` of the memory's
bandwidth), and `LAUNCH_S`. Traffic is what a kernel touches: of an operand that it only slices, the
slice; of a buffer that it updates in place, the update. An asynchronous collective runs from its
start beside the kernels, after the collective before it, and its done waits for it. A loop runs its
body as often as XLA says.

What it does not see: kernels that share the device with each other or with a collective, caches,
and the fill of the device by small kernels.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.errors import ArgumentError
from autopar.ir.mesh import ClusterSpec, DeviceSpec
from autopar.runtime.hlo import CollectiveOp, convolution_flops, product_flops, read_collective
from autopar.runtime.hlo_text import HloModule, Instruction

PRODUCTS = 0.7
MEMORY = 0.8
LAUNCH_S = 2e-6

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
_VIEWS = frozenset(("bitcast", "reshape", "copy", "convert"))
_SLICES = frozenset(("slice", "dynamic-slice", "gather"))
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # which operand holds the update
_CUBLAS = re.compile(r'custom_call_target="__cublas\$')
_CUDNN_CONVOLUTION = re.compile(r'custom_call_target="__cudnn\$conv')
_CUDNN_ATTENTION = re.compile(r'custom_call_target="__cudnn\$fmha\w*?(?P<back>Backward)?"')
_BACKWARD_ATTENTION = 2.5  # five products in place of two


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
    unknown_loops: names of loops whose trips XLA does not know; they count once.

    Of a conditional, the slowest branch counts.
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

    def add_collective(self, op: CollectiveOp, place: str, seconds: float, times: int) -> None:
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
        self.unknown_loops: list[str] = []

    def judge(self) -> Judgement:
        clock = self._run(self.module.entry, 1)
        kernels = [
            Kernel(name, op_name, int(count), seconds, flops, num_bytes)
            for (name, op_name), (count, seconds, flops, num_bytes) in self.sums.kernels.items()
            if count
        ]
        return Judgement(
            max(clock.kernels, clock.links),
            self.sums.compute,
            self.sums.links,
            clock.exposed + max(0.0, clock.links - clock.kernels),
            self.sums.flops,
            tuple(
                LinkUse(kind, place, int(count), sent, seconds)
                for (kind, place), (count, sent, seconds) in sorted(self.sums.uses.items())
            ),
            tuple(sorted(kernels, key=lambda kernel: -kernel.seconds)),
            tuple(dict.fromkeys(self.unknown_loops)),
        )

    def _run(self, computation: str, times: int) -> _Streams:
        """A computation from idle streams; `times`: how often it runs, for the sums."""
        clock = _Streams()
        listed = self.module.computations[computation]
        by_name = {one.name: one for one in listed}
        for one in listed:
            self._start(one, by_name, clock, times)
        clock.wait(max(clock.ends.values(), default=0.0))
        return clock

    def _start(
        self, one: Instruction, by_name: Mapping[str, Instruction], clock: _Streams, times: int
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
            slowest = max(one.called, key=lambda name: self._run(name, 0).kernels)
            self._inline(self._run(slowest, times), clock, 1)
        elif one.opcode in ("call", "async-start", "call-start"):
            for name in one.called:
                self._inline(self._run(name, times), clock, 1)
        else:
            self._kernel(one, by_name, clock, times)

    def _collective(self, one: Instruction) -> CollectiveOp | None:
        if one.kind in _COLLECTIVES:
            return read_collective(one, self.module)
        if one.opcode == "async-start":
            for name in one.called:
                for inner in self.module.computations.get(name, ()):
                    if inner.kind in _COLLECTIVES:
                        return read_collective(inner, self.module)
        return None

    def _loop(self, one: Instruction, clock: _Streams, times: int) -> None:
        trips = one.trips
        if trips is None:
            self.unknown_loops.append(one.name)
            trips = 1
        for name in one.called:
            self._inline(self._run(name, times * trips), clock, trips)

    def _inline(self, inner: _Streams, clock: _Streams, times: int) -> None:
        begin = max(clock.kernels, clock.links if inner.links else 0.0)
        clock.wait(begin)
        clock.kernels = begin + times * max(inner.kernels, inner.links)
        clock.exposed += times * inner.exposed
        if inner.links:
            clock.links = clock.kernels

    def _kernel(
        self, one: Instruction, by_name: Mapping[str, Instruction], clock: _Streams, times: int
    ) -> None:
        flops_s, flops, num_bytes = self._work(one, by_name)
        seconds = LAUNCH_S + max(
            flops_s / PRODUCTS, num_bytes / (MEMORY * self.device.memory_bandwidth)
        )
        clock.kernels += seconds
        self.sums.compute += times * seconds
        self.sums.flops += times * flops
        sums = self.sums.kernels.setdefault((one.name, one.op_name), [0.0] * 4)
        for place, value in enumerate((1.0, seconds, flops, num_bytes)):
            sums[place] += times * value

    def _work(
        self, one: Instruction, by_name: Mapping[str, Instruction]
    ) -> tuple[float, float, float]:
        """Seconds of its products at the peak rate, their flops, and its traffic in bytes."""
        if one.opcode == "fusion":
            inner = self.module.computations[one.called[0]]
            inside = {other.name: other for other in inner}
            flops_s, flops = self._products(inner, inside)
            return flops_s, flops, _fusion_bytes(one, inner, inside, by_name)
        flops_s, flops = self._products([one], by_name)
        return flops_s, flops, _plain_bytes(one, by_name)

    def _products(
        self, listed: Iterable[Instruction], by_name: Mapping[str, Instruction]
    ) -> tuple[float, float]:
        seconds = total = 0.0
        for one in listed:
            flops = _product_flops(one, by_name)
            if flops:
                total += flops
                seconds += flops / self._peak(by_name[one.operands[0]].results[0].dtype)
        return seconds, total

    def _peak(self, dtype: str) -> float:
        if dtype.startswith(("f8", "s8", "u8")):
            return 2 * self.device.flops_16bit
        if dtype in ("bf16", "f16"):
            return self.device.flops_16bit
        return self.device.flops_32bit


def _start_of(done: Instruction, by_name: Mapping[str, Instruction]) -> str:
    """The start of an asynchronous pair, through its updates."""
    name = done.operands[0]
    while name in by_name and by_name[name].opcode.endswith("-update"):
        name = by_name[name].operands[0]
    return name


def _product_flops(one: Instruction, by_name: Mapping[str, Instruction]) -> float:
    is_call = one.opcode == "custom-call"
    if is_call and (attention := _CUDNN_ATTENTION.search(one.attributes)):
        queries, keys_shape = (by_name[name].results[0].shape for name in one.operands[:2])
        if len(queries) != 4 or len(keys_shape) != 4:  # by its bytes alone
            return 0.0
        (batch, length, heads, width), keys = queries, keys_shape[1]
        factor = _BACKWARD_ATTENTION if attention["back"] else 1.0
        return 4.0 * batch * heads * length * keys * width * factor
    shapes = [by_name[n].results[0].shape for n in one.operands[:2] if n in by_name]
    if one.opcode == "dot" or (is_call and _CUBLAS.search(one.attributes)):
        return product_flops(one, shapes)
    if is_call and _CUDNN_CONVOLUTION.search(one.attributes):
        return convolution_flops(one, shapes)
    return 0.0


def _bytes(one: Instruction) -> float:
    return sum(array.num_bytes for array in one.results)


def _plain_bytes(one: Instruction, by_name: Mapping[str, Instruction]) -> float:
    """Traffic of an instruction that is a kernel of its own."""
    operands = [by_name[name] for name in one.operands if name in by_name]
    if one.opcode in _SLICES:
        return 2 * _bytes(one) + sum(map(_bytes, operands[1:]))
    if (place := _UPDATES.get(one.opcode)) is not None and len(operands) > place:
        others = [o for n, o in enumerate(operands) if n not in (0, place)]
        touched = (
            2 if one.opcode == "dynamic-update-slice" else 3
        )  # a scatter also reads its target
        return touched * _bytes(operands[place]) + sum(map(_bytes, others))
    if one.opcode == "custom-call" and len(one.results) > 1:  # the last result is scratch memory
        written = sum(array.num_bytes for array in one.results[:-1])
    else:
        written = _bytes(one)
    return written + sum(map(_bytes, operands))


def _fusion_bytes(
    fusion: Instruction,
    inner: list[Instruction],
    inside: Mapping[str, Instruction],
    by_name: Mapping[str, Instruction],
) -> float:
    users: dict[str, list[Instruction]] = {}
    for one in inner:
        for name in one.operands:
            users.setdefault(name, []).append(one)
    root = next(one for one in inner if one.is_root)
    outputs = [inside[n] for n in root.operands] if root.opcode == "tuple" else [root]
    read = 0.0
    for one in inner:
        if one.opcode == "parameter":
            read += _read_bytes(one, users, inside)
    return read + sum(_written_bytes(output, inside) for output in outputs)


def _read_bytes(
    value: Instruction, users: Mapping[str, list[Instruction]], inside: Mapping[str, Instruction]
) -> float:
    """What a fusion reads of a parameter: all, unless every use takes only parts of it."""
    total = 0.0
    for user in users.get(value.name, ()):
        if user.operands[0] != value.name:
            touched = _bytes(value)
        elif user.opcode in _SLICES:
            touched = _bytes(user)
        elif user.opcode == "dynamic-update-slice":
            touched = 0.0
        elif user.opcode == "scatter":
            touched = _bytes(inside[user.operands[_UPDATES["scatter"]]])
        elif user.opcode in _VIEWS and user.name in users:
            touched = _read_bytes(user, users, inside)
        else:
            touched = _bytes(value)
        total += touched
    return min(total, _bytes(value))


def _written_bytes(output: Instruction, inside: Mapping[str, Instruction]) -> float:
    while output.opcode in _VIEWS and output.operands and output.operands[0] in inside:
        source = inside[output.operands[0]]
        if source.opcode not in _VIEWS and source.opcode not in _UPDATES:
            break
        output = source
    place = _UPDATES.get(output.opcode)
    return _bytes(output if place is None else inside[output.operands[place]])


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

"""The judge on made-up schedules whose times follow by hand, and on texts of real compilers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.errors import ArgumentError
from autopar.ir.devices import DeviceSpec
from autopar.ir.mesh import ClusterSpec
from autopar.measure import judge as judge_module
from autopar.measure.judge import HOST_LAUNCH_S, TRIP_S, Judgement, judge
from autopar.measure.judge_kernels import CACHE_SPEED, GRAPH_LAUNCH_S, LAUNCH_S, MEMORY

# A float32 takes a second to read; arithmetic takes no time.
DEVICE = DeviceSpec(
    "made-up",
    flops_16bit=1e12,
    flops_32bit=1e12,
    memory_bytes=1e9,
    memory_bandwidth=4.0 / MEMORY,
    intra_host_bandwidth=4.0,
    host_bandwidth=1.0,
    intra_host_alpha_s=0.0,
    inter_host_alpha_s=0.0,
)
ALL_OF_TWO = "replica_groups={{0,1}}"
TEXTS = sorted((Path(__file__).parents[1] / "runtime/hlo_texts").glob("*-gpu.txt"))


@pytest.fixture(autouse=True)
def cache_bytes(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A device without cache, or with one of this size."""

    def set_size(num_bytes: float) -> None:
        monkeypatch.setattr(judge_module, "CACHE_BYTES", num_bytes)

    set_size(0.0)
    return set_size


def module(entry: str, others: str = "", partitions: int = 2) -> str:
    lines = "\n".join(f"  {line.strip()}" for line in entry.strip().splitlines())
    header = f"HloModule m, is_scheduled=true, num_partitions={partitions}"
    return f"{header}\n\n{others}\nENTRY %main (p: f32[8]) -> f32[8] {{\n{lines}\n}}\n"


def computation(name: str, text: str) -> str:
    lines = "\n".join(f"  {line.strip()}" for line in text.strip().splitlines())
    return f"%{name} (a: f32[8]) -> f32[8] {{\n{lines}\n}}\n"


def seconds(value: float) -> object:
    return pytest.approx(value, rel=1e-4)


def test_a_kernel_takes_its_traffic() -> None:
    text = module(
        """%p = f32[8]{0} parameter(0)
        ROOT %t = f32[8]{0} transpose(%p), dimensions={0}"""
    )
    found = judge(text, DEVICE)
    assert found.step_s == found.compute_s == seconds(16 + LAUNCH_S)
    assert found.kernels[0].num_bytes == 64


COLLECTIVES = """%p = f32[8]{{0}} parameter(0)
    %s = f32[8]{{0}} all-reduce-start(%p), {groups}, to_apply=%add
    {kernels}
    %d = f32[8]{{0}} all-reduce-done(%s)
    ROOT %t = f32[8]{{0}} transpose(%d), dimensions={{0}}"""
KERNEL = "%k{0} = f32[8]{{0}} transpose(%p), dimensions={{0}}"


@pytest.mark.parametrize("beside", [0, 1, 2])
def test_a_collective_hides_under_kernels_that_run_before_its_done(beside: int) -> None:
    """It takes 8 s: 2 × ½ of 32 bytes at 4 per second. A kernel takes 16."""
    kernels = "\n".join(KERNEL.format(n) for n in range(beside))
    found = judge(module(COLLECTIVES.format(groups=ALL_OF_TWO, kernels=kernels)), DEVICE)
    assert found.links_s == seconds(8)
    assert found.exposed_s == seconds(0 if beside else 8)
    assert found.step_s == seconds(16 * (beside + 1) + found.exposed_s)
    assert found.hidden_s + found.exposed_s == seconds(8)


def test_collectives_follow_one_another() -> None:
    text = module(
        f"""%p = f32[8]{{0}} parameter(0)
        %a = f32[8]{{0}} all-reduce-start(%p), {ALL_OF_TWO}, to_apply=%add
        %b = f32[8]{{0}} all-reduce-start(%p), {ALL_OF_TWO}, to_apply=%add
        %ad = f32[8]{{0}} all-reduce-done(%a)
        %bd = f32[8]{{0}} all-reduce-done(%b)
        ROOT %c = f32[8]{{0}} all-reduce(%bd), {ALL_OF_TWO}, to_apply=%add"""
    )
    found = judge(text, DEVICE)
    assert found.step_s == found.exposed_s == seconds(24)


def test_between_hosts_a_group_has_its_share_of_the_network() -> None:
    def of(groups: str, partitions: int) -> float:
        text = module(COLLECTIVES.format(groups=groups, kernels=""), partitions=partitions)
        return judge(text, ClusterSpec(2, 2, device=DEVICE)).links_s

    inside = of("replica_groups={{0,1},{2,3}}", 4)
    one_each = of("replica_groups={{0,2},{1,3}}", 4)
    everyone = of("replica_groups={{0,1,2,3}}", 4)
    assert inside == seconds(32 / 4)
    assert one_each == seconds(32 / 0.5)  # half of the host's network
    assert everyone == seconds(48 / 1)


def test_a_loop_runs_its_body_so_often() -> None:
    body = computation(
        "body",
        f"""%a = f32[8]{{0}} parameter(0)
        %r = f32[8]{{0}} all-reduce(%a), {ALL_OF_TWO}, to_apply=%add
        ROOT %t = f32[8]{{0}} transpose(%r), dimensions={{0}}""",
    )
    trips = ', backend_config={"known_trip_count":{"n":"5"}}'

    def of(config: str) -> Judgement:
        text = module(
            f"""%p = f32[8]{{0}} parameter(0)
            ROOT %w = f32[8]{{0}} while(%p), condition=%cond, body=%body{config}""",
            body,
        )
        return judge(text, DEVICE)

    known, unknown = of(trips), of("")
    assert known.step_s == seconds(5 * (16 + 8)) and not known.unknown_loops
    assert known.links_s == known.exposed_s == seconds(40)
    assert known.kernels[0].count == 5
    assert unknown.step_s == seconds(24) and unknown.unknown_loops == ("w",)
    said = of(', metadata={op_name="jit(step)/expected_trips=20/expected_trips=3/while"}')
    assert said.step_s == seconds(3 * 24) and not said.unknown_loops


def test_what_is_said_of_a_loop_is_not_said_of_the_loops_in_it() -> None:
    inner = computation(
        "inner",
        """%a = f32[8]{0} parameter(0)
        ROOT %t = f32[8]{0} transpose(%a), dimensions={0}""",
    )
    scope = "jit(step)/expected_trips=4/while"

    def of(name: str) -> Judgement:
        body = computation(
            "body",
            f"""%a = f32[8]{{0}} parameter(0)
            ROOT %v = f32[8]{{0}} while(%a), condition=%cond, body=%inner, """
            f'metadata={{op_name="{name}"}}',
        )
        text = module(
            f"""%p = f32[8]{{0}} parameter(0)
            ROOT %w = f32[8]{{0}} while(%p), condition=%cond, body=%body, """
            f'metadata={{op_name="{scope}"}}',
            inner + body,
        )
        return judge(text, DEVICE)

    once, both = of(f"{scope}/while"), of(f"{scope}/expected_trips=5/while")
    assert once.unknown_loops == ("v",) and not both.unknown_loops
    assert both.step_s == pytest.approx(5 * once.step_s)


def chain(num_kernels: int, size: int = 1) -> str:
    """A loop of ten trips of so many kernels, and a last kernel."""
    array = f"f32[{size}]{{0}}"
    last = f"ROOT %k{num_kernels} = {array} negate(%k{num_kernels - 1})"
    lines = [f"%k{n} = {array} negate(%k{n - 1})" for n in range(1, num_kernels)]
    body = computation("body", "\n".join([f"%k0 = {array} parameter(0)", *lines, last]))
    return module(
        f"""%p = {array} parameter(0)
        %w = {array} while(%p), condition=%cond, body=%body, """
        f"""backend_config={{"known_trip_count":{{"n":"10"}}}}
        ROOT %n = {array} negate(%w)""",
        body,
    )


FAST = replace(DEVICE, memory_bandwidth=1e15, flops_16bit=1e18)


def test_kernels_of_a_long_trip_start_sooner() -> None:
    expected = 10 * (5 * GRAPH_LAUNCH_S + TRIP_S) + LAUNCH_S  # the last kernel is in no loop
    assert judge(chain(5), FAST).step_s == pytest.approx(expected, rel=1e-3)


def test_the_host_starts_kernels_of_a_short_trip_one_by_one() -> None:
    found = judge(chain(4), FAST)
    assert found.step_s == pytest.approx(10 * 4 * HOST_LAUNCH_S, rel=1e-3)
    assert found.compute_s == pytest.approx(41 * LAUNCH_S, rel=1e-3)
    # It is ahead of a device that has more to do.
    slow = replace(FAST, memory_bandwidth=1e9)
    found = judge(chain(4, 1000000), slow)
    assert found.step_s == pytest.approx(found.compute_s)


def test_the_branches_of_a_conditional_are_equally_likely(
    cache_bytes: Callable[[float], None],
) -> None:
    cache_bytes(1000)  # what one branch leaves there, another does not find

    def branch(name: str, size: int) -> str:
        return computation(
            name,
            f"""%a = f32[{size}]{{0}} parameter(0)
            ROOT %t = f32[{size}]{{0}} transpose(%a), dimensions={{0}}""",
        )

    text = module(
        """%p = f32[8]{0} parameter(0)
        %i = s32[] parameter(1)
        ROOT %c = f32[8]{0} conditional(%i, %p, %p), branch_computations={%small, %large}""",
        branch("small", 2) + branch("large", 8),
    )
    found = judge(text, DEVICE)
    assert found.step_s == pytest.approx((seconds(16).expected + seconds(4).expected) / 2)
    assert found.compute_s == pytest.approx(found.step_s)
    assert [kernel.count for kernel in found.kernels] == [1]


def test_what_fits_into_the_cache_is_read_from_there_in_the_next_trip(
    cache_bytes: Callable[[float], None],
) -> None:
    cache_bytes(4e4)

    def of(num_elements: int) -> float:
        body = computation(
            "body",
            f"""%a = (f32[{num_elements}]{{0}}, f32[]) parameter(0)
            %w = f32[{num_elements}]{{0}} get-tuple-element(%a), index=0
            %s = f32[] get-tuple-element(%a), index=1
            %r = f32[] reduce(%w, %s), dimensions={{0}}, to_apply=%add
            ROOT %t = (f32[{num_elements}]{{0}}, f32[]) tuple(%w, %r)""",
        )
        text = module(
            f"""%p = (f32[{num_elements}]{{0}}, f32[]) parameter(0)
            ROOT %w = (f32[{num_elements}]{{0}}, f32[]) while(%p), condition=%cond, body=%body"""
            ', backend_config={"known_trip_count":{"n":"10"}}',
            body,
        )
        return judge(text, DEVICE).step_s / (10 * num_elements)

    assert of(9000) == pytest.approx(1 / CACHE_SPEED, rel=1e-3)
    assert of(10000) == pytest.approx(1.0, rel=1e-3)


def test_what_was_just_written_is_in_the_cache(cache_bytes: Callable[[float], None]) -> None:
    cache_bytes(100)
    text = module(
        """%p = f32[8]{0} parameter(0)
        %t = f32[8]{0} transpose(%p), dimensions={0}
        %b = f32[2,4]{1,0} bitcast(%t)
        ROOT %u = f32[2,4]{1,0} transpose(%b), dimensions={0,1}"""
    )
    assert judge(text, DEVICE).step_s == seconds(16 + 8 / CACHE_SPEED + 8)


def test_a_fusion_on_another_stream_moves_what_it_touches() -> None:
    text = module(
        """%p = f32[800]{0} parameter(0)
        %i = s32[] parameter(1)
        %s = ((f32[800]{0}, s32[]), f32[8]{0}, u32[]) fusion-start(%p, %i), kind=kLoop, """
        """calls=%fused
        ROOT %d = f32[8]{0} fusion-done(%s)""",
        computation(
            "fused",
            """%a = f32[800]{0} parameter(0)
            %j = s32[] parameter(1)
            ROOT %x = f32[8]{0} dynamic-slice(%a, %j), dynamic_slice_sizes={8}""",
        ),
    )
    assert judge(text, DEVICE).kernels[0].num_bytes == 2 * 32 + 4


def test_a_text_without_schedule_is_refused() -> None:
    with pytest.raises(ArgumentError, match="not scheduled"):
        judge("HloModule m\n\nENTRY %main () -> f32[] {\n}\n", "h100-sxm")


@pytest.mark.parametrize("file", TEXTS, ids=lambda file: file.stem)
def test_what_every_compiler_prints_is_read(file: Path) -> None:
    texts = file.read_text(encoding="utf-8").split("\n// ")
    judged = [judge(text[text.find("HloModule") :], "h100-sxm") for text in texts]
    assert judged and all(one.step_s > 0 for one in judged)
    assert any(one.links_s > 0 for one in judged)
    assert all(0 <= one.exposed_s <= one.links_s * (1 + 1e-9) for one in judged)


# Collectives on hosts of eight devices; 400 bytes of result on a device.

LINKS = DeviceSpec(
    "links",
    flops_16bit=1e12,
    flops_32bit=1e12,
    memory_bytes=1e9,
    memory_bandwidth=1e12,
    intra_host_bandwidth=400.0,
    host_bandwidth=8 * 50.0,
    intra_host_alpha_s=0.25,
    inter_host_alpha_s=2.0,
)
HOSTS = ClusterSpec(4, 8, device=LINKS)
IN_HOST = "[4,8]<=[32]"  # four hosts, a group each
ACROSS = "[8,4]<=[4,8]T(1,0)"  # one device of every host
ALL = "[1,32]<=[32]"


def collective(op: str, groups: str) -> str:
    return module(
        f"""%p = f32[100]{{0}} parameter(0)
        ROOT %c = f32[100]{{0}} {op}(%p), channel_id=1, replica_groups={groups}""",
        partitions=32,
    )


@pytest.mark.parametrize(
    ("op", "groups", "expected"),
    [
        ("all-reduce", IN_HOST, 0.25 + 2 * 7 / 8 * 400 / 400),
        ("all-gather", IN_HOST, 0.25 + 7 / 8 * 400 / 400),
        ("reduce-scatter", IN_HOST, 0.25 + 7 * 400 / 400),
        ("all-to-all", IN_HOST, 0.25 + 7 / 8 * 400 / 400),
        ("all-reduce", ACROSS, 2 + 2 * 3 / 4 * 400 / 50),
        # Eight adapters on every host are as fast together as one link.
        ("all-reduce", ALL, 2 + 2 * 31 / 32 * 400 / 400),
        # Of an all-to-all, what leaves the host goes through one adapter.
        ("all-to-all", ALL, 2 + 24 / 32 * 400 / 50),
        ("all-to-all", ACROSS, 2 + 3 / 4 * 400 / 50),
    ],
)
def test_a_collective_costs_what_its_ring_does(op: str, groups: str, expected: float) -> None:
    found = judge(collective(op, groups), HOSTS)
    assert found.links_s == found.exposed_s == pytest.approx(expected)
    assert found.compute_s == 0
    assert [(use.kind, use.count) for use in found.links] == [(op, 1)]


def test_half_a_host_has_half_the_adapters() -> None:
    found = judge(collective("all-gather", "[2,16]<=[4,2,4]T(1,0,2)"), HOSTS)
    assert found.links_s == pytest.approx(2 + 15 / 16 * 400 / 200)
    (use,) = found.links
    assert use.place == "4 hosts × 4" and use.sent_bytes == pytest.approx(15 / 16 * 400)


def test_where_devices_are_is_told_by_their_hosts() -> None:
    text = collective("all-reduce", "{{0,1},{2,3}}")
    assert judge(text, HOSTS).links_s == pytest.approx(0.25 + 1.0)
    apart = judge(text, HOSTS, hosts=[0, 1] * 16)
    assert apart.links_s == pytest.approx(2 + 400 / 50)
    assert [use.place for use in apart.links] == ["2 hosts × 1"]


@pytest.mark.parametrize(
    ("pairs", "expected"), [("{{0,1},{1,0}}", 0.25 + 1), ("{{0,1},{7,8}}", 2 + 400 / 50)]
)
def test_a_permutation_is_as_fast_as_its_slowest_pair(pairs: str, expected: float) -> None:
    text = collective("collective-permute", "{}")
    text = text.replace("replica_groups={}", f"source_target_pairs={pairs}")
    assert judge(text, HOSTS).links_s == pytest.approx(expected)


def test_groups_of_one_device_cost_nothing() -> None:
    found = judge(collective("all-reduce", "[32,1]<=[32]"), HOSTS)
    assert found.step_s == 0 and found.links == ()

"""The suite's formula against programs whose cost is known in closed form."""

import pytest

from benchmarks.suite.judge import Machine, added, judge, repeated

MACHINE = Machine(
    flops=1e12,
    efficiency=0.5,
    link_bandwidth=400.0,
    adapter_bandwidth=50.0,
    link_alpha_s=0.25,
    adapter_alpha_s=2.0,
    devices_per_host=8,
)
IN_HOST = "[4,8]<=[32]"  # four hosts, a group each
ACROSS = "[8,4]<=[4,8]T(1,0)"  # one device of every host
ALL = "[1,32]<=[32]"


def program(op: str, groups: str, result: str = "f32[100]", extra: str = "") -> str:
    return f"""\
HloModule step, num_partitions=32

ENTRY %main (p: {result}) -> {result} {{
  %p = {result}{{0}} parameter(0)
  ROOT %c = {result}{{0}} {op}(%p), channel_id=1, replica_groups={groups}{extra}
}}
"""


@pytest.mark.parametrize(
    ("op", "groups", "seconds"),
    [
        # 400 bytes of result on a device.
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
def test_a_collective_costs_what_the_formula_says(op, groups, seconds):
    judged = judge(program(op, groups), MACHINE)
    assert judged.communication_s == pytest.approx(seconds)
    assert judged.compute_s == 0
    assert judged.collectives == {op: 1}


def test_half_a_host_has_half_the_adapters():
    groups = "[2,16]<=[4,2,4]T(1,0,2)"  # four devices of every host
    judged = judge(program("all-gather", groups), MACHINE)
    assert judged.communication_s == pytest.approx(2 + 15 / 16 * 400 / 200)
    assert judged.sent_bytes == {"4 hosts × 4": pytest.approx(15 / 16 * 400)}


def test_where_devices_are_is_told_by_their_hosts():
    pairs = "{{0,1},{2,3}}"
    text = program("all-reduce", pairs)
    assert judge(text, MACHINE).communication_s == pytest.approx(0.25 + 1.0)
    apart = judge(text, MACHINE, hosts=[0, 1] * 16)
    assert apart.communication_s == pytest.approx(2 + 400 / 50)
    assert apart.sent_bytes == {"2 hosts × 1": pytest.approx(400)}


@pytest.mark.parametrize(
    ("pairs", "seconds"), [("{{0,1},{1,0}}", 0.25 + 1), ("{{0,1},{7,8}}", 2 + 400 / 50)]
)
def test_a_permutation_is_as_fast_as_its_slowest_pair(pairs, seconds):
    text = program("collective-permute", "{}").replace(
        "replica_groups={}", f"source_target_pairs={pairs}"
    )
    assert judge(text, MACHINE).communication_s == pytest.approx(seconds)


def test_groups_of_one_device_cost_nothing():
    assert judge(program("all-reduce", "[32,1]<=[32]"), MACHINE).step_s == 0


LOOP = """\
HloModule step, num_partitions=8

%body (arg: (s32[], f32[64,16])) -> (s32[], f32[64,16]) {
  %arg = (s32[], f32[64,16]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %x = f32[64,16]{1,0} get-tuple-element(%arg), index=1
  %w = f32[16,16]{1,0} constant({...})
  %y = f32[64,16]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %z = f32[64,16]{1,0} all-reduce(%y), channel_id=1, replica_groups=[1,8]<=[8], to_apply=%add
  ROOT %out = (s32[], f32[64,16]{1,0}) tuple(%i, %z)
}

%condition (arg: (s32[], f32[64,16])) -> pred[] {
  %arg = (s32[], f32[64,16]{1,0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (p: (s32[], f32[64,16])) -> (s32[], f32[64,16]) {
  %p = (s32[], f32[64,16]{1,0}) parameter(0)
  ROOT %w = (s32[], f32[64,16]{1,0}) while(%p), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"12"}}
}
"""


def test_loops_count_as_often_as_they_run():
    judged = judge(LOOP, MACHINE)
    assert judged.flops == 12 * 2 * 64 * 16 * 16
    assert judged.compute_s == pytest.approx(judged.flops / 0.5e12)
    assert judged.communication_s == pytest.approx(12 * (0.25 + 2 * 7 / 8 * 4096 / 400))
    assert judged.collectives == {"all-reduce": 12}
    assert judged.step_s == judged.compute_s + judged.communication_s


def test_programs_one_after_another_are_added_up():
    once = judge(LOOP, MACHINE)
    both = added([repeated(once, 3), judge(program("all-reduce", IN_HOST), MACHINE)])
    assert both.flops == 3 * once.flops
    assert both.step_s == pytest.approx(3 * once.step_s + 0.25 + 2 * 7 / 8)
    assert both.collectives == {"all-reduce": 37}
    assert both.sent_bytes["8 in a host"] == pytest.approx(3 * 12 * 2 * 7 / 8 * 4096 + 700)

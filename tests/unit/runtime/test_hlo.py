from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autopar.errors import DependencyError
from autopar.runtime.hlo import (
    CollectiveOp,
    collective_seconds,
    read_collectives,
    read_dot_flops,
)

HEADER = (
    "HloModule jit_step, is_scheduled=true, entry_computation_layout={()->()}, num_partitions=8"
)


def module(*instructions: str) -> str:
    body = "\n".join("  " + line for line in instructions)
    return f"{HEADER}\n\nENTRY %main.5_spmd (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"


def only(instruction: str) -> CollectiveOp:
    (op,) = read_collectives(module(instruction))
    return op


# -- kinds and bytes


@pytest.mark.parametrize(
    ("kind", "attributes", "sent_bytes"),
    [
        ("all-reduce", "to_apply=%add", 2 * 3 / 4 * 256),
        ("all-gather", "dimensions={0}", 3 / 4 * 256),
        ("reduce-scatter", "dimensions={0}, to_apply=%add", 3 / 4 * 4 * 256),
        ("all-to-all", "dimensions={0}", 3 / 4 * 256),
    ],
)
def test_each_kind(kind: str, attributes: str, sent_bytes: float) -> None:
    op = only(
        f"%{kind}.1 = f32[8,8]{{1,0}} {kind}(%fusion), channel_id=1, "
        f"replica_groups=[2,4]<=[8], {attributes}, "
        'metadata={op_name="jit(step)/Dense_0/dot_general" source_line=3}'
    )
    assert op == CollectiveOp(
        kind,
        256,
        4,
        ((8, 8),),
        trips=1,
        op_name="jit(step)/Dense_0/dot_general",
        groups=((0, 1, 2, 3), (4, 5, 6, 7)),
        dtype="f32",
    )
    assert op.sent_bytes == pytest.approx(sent_bytes)
    assert not op.is_scalar


@pytest.mark.parametrize(
    ("array", "num_bytes"),
    [
        ("bf16[3,5]{1,0}", 30),
        ("f32[]", 4),
        ("pred[16]{0}", 16),
        ("f64[2]{0}", 16),
        ("c64[2]{0}", 16),
        ("f8e4m3fn[32]{0}", 32),
        ("f4e2m1fn[32]{0}", 32),
        ("f32[<=4,2]{1,0}", 32),
        ("bf16[16,128]{1,0:T(8,128)(2,1)S(1)}", 4096),  # a tiled layout
    ],
)
def test_bytes_by_type(array: str, num_bytes: int) -> None:
    op = only(f"%ar = {array} all-reduce(%p), replica_groups={{}}, to_apply=%add")
    assert op.num_bytes == num_bytes
    assert op.is_scalar == (array == "f32[]")


def test_a_reduction_of_many_arrays_is_one_collective() -> None:
    op = only(
        "ROOT %all-reduce.6 = (f32[], f32[16]{0}, bf16[4,2]{1,0}) all-reduce(%a, %b, %c), "
        "replica_groups={{0,4},{1,5}}, to_apply=%add"
    )
    assert op.num_bytes == 4 + 64 + 16
    assert op.shapes == ((), (16,), (4, 2))
    assert not op.is_scalar


def test_long_tuples_have_their_elements_numbered() -> None:
    arrays = ["f32[2]{0}"] * 5 + ["/*index=5*/f32[4]{0}"] + ["f32[2]{0}"] * 4
    arrays += ["/*index=10*/f32[8]{0}"]
    operands = ", ".join(f"%p.{i}" for i in range(len(arrays)))
    op = only(
        f"%ar = ({', '.join(arrays)}) all-reduce({operands}), "
        "replica_groups=[1,8]<=[8], to_apply=%add"
    )
    assert op.shapes == ((2,),) * 5 + ((4,),) + ((2,),) * 4 + ((8,),)
    assert op.num_bytes == 4 * (9 * 2 + 4 + 8)


# -- groups


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("replica_groups=[2,4]<=[8]", 4),
        ("replica_groups=[4,2]<=[2,2,2]T(2,1,0)", 2),
        ("replica_groups=[1,8]<=[8]", 8),
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", 2),
        ("replica_groups={{0,1,2,3,4,5,6,7}}", 8),
        ("replica_groups={{0},{1}}", 1),
        ("replica_groups={}", 8),  # all
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", 4),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0','axis_1'}", 8),
        ("replica_groups=mesh['axis_0'=8] {'axis_0':(2)4}", 4),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_0'}", 4),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_1'}", 2),
    ],
)
def test_group_sizes(groups: str, size: int) -> None:
    op = only(f"%ag = f32[8]{{0}} all-gather(%p), channel_id=1, {groups}, dimensions={{0}}")
    assert op.group_size == size
    assert op.sent_bytes == pytest.approx((size - 1) / size * 32)


@pytest.mark.parametrize(
    ("groups", "wanted"),
    [
        ("replica_groups=[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("replica_groups={}", (tuple(range(8)),)),
        (
            "replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}",
            ((0, 4), (1, 5), (2, 6), (3, 7)),
        ),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0','axis_1'}", (tuple(range(8)),)),
        ("replica_groups=mesh['axis_0'=8] {'axis_0':(2)4}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=mesh['axis_0'=8] {'axis_0':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        (
            "replica_groups=mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_0'}",
            ((0, 1, 2, 3), (4, 5, 6, 7)),
        ),
        (
            "replica_groups=mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_1'}",
            ((0, 4), (1, 5), (2, 6), (3, 7)),
        ),
        (
            "replica_groups=mesh['a'=2,'b'=4], device_ids=(1,0,2,3,4,5,7,6) {'b'}",
            ((1, 0, 2, 3), (4, 5, 7, 6)),
        ),
        ("replica_groups=mesh['a'=8] {'a':(1)2,'a':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("replica_groups=mesh['a'=4,'b'=2] {'a':(2)2,'b'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=mesh['a'=8,'b'=1] {'b'}", tuple((n,) for n in range(8))),
    ],
)
def test_groups(groups: str, wanted) -> None:
    op = only(f"%ag = f32[8]{{0}} all-gather(%p), channel_id=1, {groups}, dimensions={{0}}")
    assert op.groups == wanted and op.dtype == "f32"


@pytest.mark.parametrize(
    "groups",
    [
        "replica_groups=<2x4>",  # a form of some later version
        "replica_groups=[2,4]<=[8]V(1)",
        "replica_groups=[3,4]<=[8]",
        "replica_groups=[2,4]<=[4,2]T(2,0)",
        "replica_groups={{0,1},{2,3}",
        "replica_groups={{0,1},{a,b}}",
        "replica_groups=mesh['a'=2,'b'=4] {'c'}",
        "replica_groups=mesh['a'=2,'b'=4] {b}",
        "replica_groups=mesh['a'=8] {'a':(2)3}",
        "replica_groups=mesh['a'=8] {'a':(1)4,'a':(2)2}",
        "replica_groups=mesh['a'=2,'b'=4], device_ids=(0,1,2) {'b'}",
        "source_target_pairs=[2]",
        "dimensions={0}",
    ],
)
def test_groups_that_cannot_be_read_are_an_error_that_shows_the_line(groups: str) -> None:
    line = f"%ag = f32[8]{{0}} all-gather(%p), channel_id=1, {groups}, use_global_device_ids=true"
    with pytest.raises(DependencyError) as raised:
        only(line)
    assert line in str(raised.value)


def test_pairs_of_a_permutation() -> None:
    op = only("%cp = bf16[8]{0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}")
    assert op.groups == ((0, 1), (1, 0)) and op.dtype == "bf16"
    op = only("%cp = bf16[8]{0} collective-permute(%p), source_target_pairs={}")
    assert (op.groups, op.group_size) == ((), 1)


def test_permutes_send_once_unless_to_themselves() -> None:
    line = "%cp = f32[8]{0} collective-permute(%p), channel_id=1, source_target_pairs="
    moved = only(line + "{{0,1},{1,0}}")
    assert (moved.group_size, moved.sent_bytes) == (2, 32)
    assert only(line + "{{0,0},{1,1}}").sent_bytes == 0


# -- asynchronous pairs


@pytest.mark.parametrize(
    ("start", "done", "shapes"),
    [
        (
            "(f32[2]{0}, f32[8]{0}) all-gather-start(%p), dimensions={0}",
            "f32[8]{0} all-gather-done",
            ((8,),),
        ),
        (
            "((f32[2]{0}, bf16[1]{0}), (f32[8]{0}, bf16[4]{0})) all-gather-start(%p, %q), "
            "dimensions={0}",
            "(f32[8]{0}, bf16[4]{0}) all-gather-done",
            ((8,), (4,)),
        ),
        ("f32[8]{0} all-reduce-start(%p), to_apply=%add", "f32[8]{0} all-reduce-done", ((8,),)),
        (  # the type of a reduction is that of its results, in order
            "(f32[8]{0}, f32[4]{0}) all-reduce-start(%p, %q), to_apply=%add",
            "(f32[8]{0}, f32[4]{0}) all-reduce-done",
            ((8,), (4,)),
        ),
        (
            "((f32[8]{0}), f32[8]{0}) all-reduce-start(f32[8]{0} %p), to_apply=%add",
            "f32[8]{0} all-reduce-done",
            ((8,),),
        ),
        (
            "((f32[8]{0}), f32[2]{0}) reduce-scatter-start(%p), dimensions={0}, to_apply=%add",
            "f32[2]{0} reduce-scatter-done",
            ((2,),),
        ),
        (
            "((f32[8]{0}), f32[8]{0}, u32[]) all-to-all-start(%p), dimensions={0}",
            "f32[8]{0} all-to-all-done",
            ((8,),),
        ),
        (
            "(f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%p)",
            "f32[8]{0} collective-permute-done",
            ((8,),),
        ),
        (
            "(f32[8]{0}, f32[8]{0}) collective-permute-start(%p)",
            "f32[8]{0} collective-permute-done",
            ((8,),),
        ),
    ],
)
def test_an_asynchronous_pair_is_counted_once(start: str, done: str, shapes) -> None:
    groups = (
        ", source_target_pairs={{0,1}}" if "permute" in start else ", replica_groups=[2,4]<=[8]"
    )
    text = module(f"%start.1 = {start}{groups}", f"%done.1 = {done}(%start.1)")
    (op,) = read_collectives(text)
    assert op.shapes == shapes
    assert op.kind in start
    assert "-start" not in op.kind


def test_a_wrapped_collective_is_counted_where_it_stands() -> None:
    text = f"""{HEADER}

%async_computation (p: f32[8]) -> f32[2] {{
  %p = f32[8]{{0}} parameter(0)
  ROOT %rs = f32[2]{{0}} reduce-scatter(%p), replica_groups=[2,4]<=[8], to_apply=%add
}}

ENTRY %main (p: f32[8]) -> f32[2] {{
  %p.1 = f32[8]{{0}} parameter(0)
  %s = ((f32[8]{{0}}), f32[2]{{0}}, s32[]) async-start(%p.1), calls=%async_computation
  ROOT %d = f32[2]{{0}} async-done(%s)
}}
"""
    (op,) = read_collectives(text)
    assert (op.kind, op.shapes) == ("reduce-scatter", ((2,),))


def test_what_only_looks_like_a_collective() -> None:
    text = module(
        "%fusion = f32[8]{0} fusion(%all-reduce.1), kind=kLoop, calls=%fused",
        "%gte = f32[8]{0} get-tuple-element(%all-reduce-start.3), index=0",
        '%c = f32[8]{0} custom-call(%p), metadata={op_name="jit(f)/x = all-reduce(y)"}',
        "%done = f32[8]{0} all-reduce-done(%all-reduce-start.3)",
    )
    assert read_collectives(text) == ()
    assert read_collectives("") == ()


# -- loops

LOOPS = f"""{HEADER}

%add (a: f32[], b: f32[]) -> f32[] {{
  ROOT %sum = f32[] add(%a, %b)
}}

%branch_a (p: f32[8]) -> f32[8] {{
  ROOT %ar.a = f32[8]{{0}} all-reduce(%p), replica_groups=[1,8]<=[8], to_apply=%add
}}

%branch_b (p: f32[8]) -> f32[8] {{
  ROOT %ag.b = f32[8]{{0}} all-gather(%p), replica_groups=[1,8]<=[8], dimensions={{0}}
}}

%inner_body (t: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %rs = f32[1]{{0}} reduce-scatter(%x), replica_groups=[1,8]<=[8], to_apply=%add
}}

%inner_condition (t: (s32[], f32[8])) -> pred[] {{
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}}

%outer_body (t: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %a2a = f32[8]{{0}} all-to-all(%x), replica_groups=[1,8]<=[8], dimensions={{0}}
  %while.1 = (s32[], f32[8]{{0}}) while(%t), condition=%inner_condition, body=%inner_body, \
backend_config={{"known_trip_count":{{"n":"3"}}}}
  %cond = f32[8]{{0}} conditional(%i, %x, %x), branch_computations={{%branch_a, %branch_b}}
}}

%outer_condition (t: (s32[], f32[8])) -> pred[] {{
  ROOT %lt.1 = pred[] compare(%i, %n), direction=LT
}}

%unknown_body (t: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %cp = f32[8]{{0}} collective-permute(%x), source_target_pairs={{{{0,1}}}}
}}

ENTRY %main (p: f32[8]) -> f32[8] {{
  %ar.main = f32[4]{{0}} all-reduce(%p), replica_groups=[1,8]<=[8], to_apply=%add
  %while.2 = (s32[], f32[8]{{0}}) while(%t), condition=%outer_condition, body=%outer_body, \
backend_config={{"known_init_step":{{"init":"0"}},"known_trip_count":{{"n":"5"}}}}
  %while.3 = (s32[], f32[8]{{0}}) while(%t), condition=%outer_condition, body=%unknown_body
}}
"""


def test_trip_counts_multiply() -> None:
    ops = {(op.kind, op.shapes): op for op in read_collectives(LOOPS)}
    assert {key: op.trips for key, op in ops.items()} == {
        ("all-reduce", ((4,),)): 1,
        ("all-to-all", ((8,),)): 5,
        ("reduce-scatter", ((1,),)): 15,
        ("all-reduce", ((8,),)): 5,  # in a branch, in the loop
        ("all-gather", ((8,),)): 5,
        ("collective-permute", ((8,),)): 1,  # nobody knows how often
    }
    assert {op.in_loop for op in ops.values() if op.trips > 1} == {True}
    assert not ops["all-reduce", ((4,),)].in_loop
    assert ops["all-to-all", ((8,),)].sent_bytes == pytest.approx(5 * 7 / 8 * 32)


def test_a_computation_runs_as_often_as_it_is_called() -> None:
    """Twice here, for some versions name the computation again where a pair ends."""
    text = f"""{HEADER}

%shared (p: f32[8]) -> f32[8] {{
  ROOT %ar = f32[8]{{0}} all-reduce(%p), replica_groups=[1,8]<=[8], to_apply=%add
}}

ENTRY %main (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  %one = f32[8]{{0}} call(%p), to_apply=%shared
  %start = ((f32[8]{{0}}), f32[8]{{0}}, s32[]) async-start(%one), calls=%shared
  ROOT %done = f32[8]{{0}} async-done(%start), calls=%shared
}}
"""
    (op,) = read_collectives(text)
    assert (op.trips, op.in_loop) == (2, False)


def test_old_style_branches_are_followed_too() -> None:
    text = LOOPS.replace(
        "branch_computations={%branch_a, %branch_b}",
        "true_computation=%branch_a, false_computation=%branch_b",
    )
    assert read_collectives(text) == read_collectives(LOOPS)


def test_seconds_by_the_ring_formulas() -> None:
    ops = (
        CollectiveOp("all-reduce", 100, 4, ((25,),)),
        CollectiveOp("all-gather", 100, 4, ((25,),), trips=3),
    )
    assert collective_seconds(ops, bandwidth=10.0) == pytest.approx(15 + 22.5)
    assert collective_seconds(ops, bandwidth=10.0, alpha_s=2.0) == pytest.approx(15 + 22.5 + 8)
    assert collective_seconds((), bandwidth=10.0) == 0


# -- products


def test_flops_of_products() -> None:
    text = f"""{HEADER}

%body (t: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {{
  %x = f32[8,4]{{1,0}} get-tuple-element(%t), index=1
  %w = f32[4,4]{{1,0}} constant({{...}})
  %dot.1 = f32[8,4]{{1,0}} dot(%x, %w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}

ENTRY %main (p: f32[8,4]) -> f32[8,4] {{
  %p = f32[2,8,4]{{2,1,0}} parameter(0)
  %q = f32[2,4,6]{{2,1,0}} parameter(1)
  %dot.2 = f32[2,8,6]{{2,1,0}} dot(%p, %q), lhs_batch_dims={{0}}, lhs_contracting_dims={{2}}, \
rhs_batch_dims={{0}}, rhs_contracting_dims={{1}}
  %w = (s32[], f32[8,4]) while(%t), condition=%c, body=%body, \
backend_config={{"known_trip_count":{{"n":"7"}}}}
}}
"""
    assert read_dot_flops(text) == 2 * (2 * 8 * 6) * 4 + 7 * 2 * (8 * 4) * 4


def test_products_of_cublas_count_as_flops() -> None:
    """Of GPUs for which XLA has no kernels of its own; a workspace comes with the result."""
    config = 'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{%s}}}'
    plain = config % '"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]'
    batched = config % '"lhs_contracting_dimensions":["2"],"lhs_batch_dimensions":["0"]'
    text = f"""{HEADER}

ENTRY %main (p: f32[16,512]) -> f32[16,1024] {{
  %p = f32[16,512]{{1,0}} parameter(0)
  %q = f32[512,1024]{{1,0}} parameter(1)
  %call.1 = (f32[16,1024]{{1,0}}, s8[4194304]{{0}}) custom-call(%p, %q), \
custom_call_target="__cublas$lt$matmul", {plain}
  %got = f32[16,1024]{{1,0}} get-tuple-element(%call.1), index=0
  %a = f32[2,8,4]{{2,1,0}} parameter(2)
  %b = f32[2,4,6]{{2,1,0}} parameter(3)
  %call.2 = f32[2,8,6]{{2,1,0}} custom-call(f32[2,8,4]{{2,1,0}} %a, %b), \
custom_call_target="__cublas$gemm", {batched}
  %other = f32[2,8,6]{{2,1,0}} custom-call(%a, %b), custom_call_target="__cublas$triangularSolve"
}}
"""
    assert read_dot_flops(text) == 2 * (16 * 1024) * 512 + 2 * (2 * 8 * 6) * 4


# -- what XLA really prints


def test_a_compiled_program() -> None:
    """Contracting over a split dimension in a loop, and sums over all devices after it."""
    mesh = jax.make_mesh((2, 4), ("x", "y"))

    def function(w, x):
        x, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=3)
        return x.sum()

    shardings = (NamedSharding(mesh, P("y")), NamedSharding(mesh, P("x", "y")))
    arrays = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 2
    compiled = jax.jit(function, in_shardings=shardings).lower(*arrays).compile()
    ops = read_collectives(compiled.as_text())
    in_loop = [op for op in ops if op.in_loop]
    assert [(op.trips, op.group_size) for op in in_loop] == [(3, 4)]
    assert {op.kind for op in in_loop} <= {"all-reduce", "reduce-scatter"}
    assert in_loop[0].sent_bytes <= 3 * 2 * 3 / 4 * (32 * 64 * 4)
    after = [op for op in ops if not op.in_loop]
    assert after and all(op.is_scalar and op.kind == "all-reduce" for op in after)


def test_convolutions_of_cudnn_count_as_flops() -> None:
    """3 × 3 windows over 64 features, 8 × 16 × 16 × 128 outputs; the gradients the same."""
    how = (
        'window={size=3x3 stride=2x2}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$conv'
    )
    shapes = {"x": "8,33,33,64", "k": "128,3,3,64", "g": "8,16,16,128"}
    calls = (
        ("g", "x", "k", "Forward"),
        ("k", "x", "g", "BackwardFilter"),
        ("x", "g", "k", "BackwardInput"),
    )
    lines = [f"  %{n} = bf16[{s}]{{3,2,1,0}} parameter(0)" for n, s in shapes.items()]
    lines += [
        f"  %{kind} = (bf16[{shapes[out]}]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%{a}, %{b}), "
        f'{how}{kind}"'
        for out, a, b, kind in calls
    ]
    text = "ENTRY %main (x: f32[]) -> f32[] {\n" + "\n".join(lines) + "\n}\n"
    assert read_dot_flops(text) == 3 * 2 * (8 * 16 * 16 * 128) * 9 * 64

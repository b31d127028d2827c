from __future__ import annotations

import copy
import hashlib
import json
from dataclasses import MISSING, fields, replace
from math import inf
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.errors import PlanError
from autopar.ir.plan import FORMAT_VERSION, ParallelPlan, check_plan
from autopar.ir.spec import WHOLE


def step(state, batch):
    def loss_of(params):
        hidden = jnp.tanh(batch["x"] @ params["w"])

        def layer(h, _):  # a loop, so that the plan has a body inside a body's equation
            return jnp.tanh(h @ params["v"]), None

        hidden, _ = jax.lax.scan(layer, hidden, None, length=2)
        return (hidden**2).mean()

    loss, grads = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


STATE, BATCH = {"w": array(8, 16), "v": array(16, 16)}, {"x": array(64, 8)}
CLUSTER = autopar.ClusterSpec(1, 4, "h100-sxm")


@pytest.fixture(scope="module")
def plan() -> ParallelPlan:
    method = autopar.ManualParallel(
        (2, 2), ("data", "model"), (P(), {"x": P("data")}), num_micro_batches=1
    )
    made = autopar.plan(step, STATE, BATCH, cluster=CLUSTER, method=method)
    return replace(made, warnings=("a warning with ≥ and \n",))


def sealed(body: Any, **changes: Any) -> str:
    """A plan file whose checksum fits its body, as a forger would write it."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps(
        {
            "format": "autopar-plan",
            "version": FORMAT_VERSION,
            "plan": body,
            "sha256": digest,
            **changes,
        }
    )


def body_of(plan: ParallelPlan) -> dict[str, Any]:
    return json.loads(plan.to_json())["plan"]


# -- what comes back


def test_json_round_trip(plan: ParallelPlan) -> None:
    read = ParallelPlan.from_json(plan.to_json())
    assert read == plan
    assert read.to_json() == plan.to_json()
    assert any(e.bodies for e in read.program.equations)


def test_every_field_is_in_the_file(plan: ParallelPlan) -> None:
    names = {f.name for f in fields(ParallelPlan)} - {"in_tree", "out_tree", "origin", "cached"}
    names -= {f.name for f in fields(ParallelPlan) if f.metadata.get("omit_none")}
    assert set(body_of(plan)) == names


def test_the_file_is_sealed_as_the_test_seals_it(plan: ParallelPlan) -> None:
    assert ParallelPlan.from_json(sealed(body_of(plan))) == plan


def test_save_and_load(plan: ParallelPlan, tmp_path: Path) -> None:
    for path in (tmp_path / "plan.json", str(tmp_path / "text.json")):
        plan.save(path)
        assert ParallelPlan.load(path) == plan
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plan.json", "text.json"]


def test_specs_are_a_pytree_before_and_paths_after(plan: ParallelPlan) -> None:
    whole = P()
    assert plan.input_specs == ({"v": whole, "w": whole}, {"x": P("data")})
    assert plan.output_specs[1] == whole
    read = ParallelPlan.from_json(plan.to_json())
    assert read.input_specs == {
        "state['v']": whole,
        "state['w']": whole,
        "batch['x']": P("data"),
    }
    assert read.input_stages == {path: (0,) for path in read.input_specs}


def test_a_plan_read_from_a_file_plans_the_same(plan: ParallelPlan) -> None:
    read = ParallelPlan.from_json(plan.to_json())
    again = autopar.plan(step, STATE, BATCH, cluster=CLUSTER, method=read)  # type: ignore[arg-type]
    assert again == plan
    assert again.input_specs == plan.input_specs


def test_a_plan_for_other_arguments(plan: ParallelPlan) -> None:
    with pytest.raises(PlanError, match=r"batch\['x'\]: the plan was made for float32\[64, 8\]"):
        autopar.plan(step, STATE, {"x": array(32, 8)}, cluster=CLUSTER, method=plan)  # type: ignore[arg-type]

    def other(state, batch):
        new_state, loss = step(state, batch)
        return new_state, loss + 1

    with pytest.raises(PlanError, match="the traced programs differ"):
        autopar.plan(other, STATE, BATCH, cluster=CLUSTER, method=plan)  # type: ignore[arg-type]


def test_explain_names_what_the_user_named(plan: ParallelPlan) -> None:
    text = plan.explain(detail="full")
    for part in ("step", "data=2 × model=2", "state['w']", "batch['x']", "float32[64, 8]"):
        assert part in text
    assert "warning: a warning with" in text


# -- files that are not believed


@pytest.mark.parametrize("keep", [0, 1, 20, 0.5, 0.999])
def test_a_file_cut_short(plan: ParallelPlan, tmp_path: Path, keep) -> None:
    text = plan.to_json()
    path = tmp_path / "cut.json"
    path.write_text(text[: keep if isinstance(keep, int) else int(keep * len(text))])
    with pytest.raises(PlanError, match=r"cut\.json: is damaged: not JSON"):
        ParallelPlan.load(path)


def digit_positions(text: str) -> list[int]:
    start, end = text.index('"plan":'), text.rindex('"sha256"')
    found = [i for i in range(start, end) if text[i].isdigit()]
    return found[:: max(1, len(found) // 20)]


def test_any_changed_digit(plan: ParallelPlan) -> None:
    text = plan.to_json()
    positions = digit_positions(text)
    assert len(positions) >= 20
    for at in positions:
        digit = str((int(text[at]) + 1) % 10)
        changed = text[:at] + digit + text[at + 1 :]
        if json.loads(changed) == json.loads(text):  # beyond the precision of a float
            continue
        with pytest.raises(PlanError):
            ParallelPlan.from_json(changed)


def test_a_changed_name_or_checksum(plan: ParallelPlan) -> None:
    for old, new in (("state['w']", "state['u']"), ('"sha256":"', '"sha256":"0')):
        text = plan.to_json()
        assert old in text
        with pytest.raises(PlanError, match="checksum does not match"):
            ParallelPlan.from_json(text.replace(old, new))


def test_a_missing_checksum(plan: ParallelPlan) -> None:
    document = json.loads(plan.to_json())
    del document["sha256"]
    with pytest.raises(PlanError, match="checksum"):
        ParallelPlan.from_json(json.dumps(document))


@pytest.mark.parametrize("version", [0, FORMAT_VERSION + 1, "1", None])
def test_another_version(plan: ParallelPlan, version) -> None:
    with pytest.raises(PlanError, match=f"plan format {version!r}, this autopar reads"):
        ParallelPlan.from_json(sealed(body_of(plan), version=version))


@pytest.mark.parametrize("text", ["[]", "3", "null", '"plan"', "{}", '{"format": "other"}'])
def test_json_that_is_no_plan(text: str) -> None:
    with pytest.raises(PlanError, match=r"not an autopar plan"):
        ParallelPlan.from_json(text)


@pytest.mark.parametrize("text", ["", "plan", "{", "\x00", "[" * 100_000])
def test_text_that_is_not_json(text: str) -> None:
    with pytest.raises(PlanError, match=r"not JSON"):
        ParallelPlan.from_json(text)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "missing.json", tmp_path, binary):
        with pytest.raises(PlanError, match="cannot be read"):
            ParallelPlan.load(path)


REQUIRED = [f.name for f in fields(ParallelPlan) if f.default is MISSING]


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_field(plan: ParallelPlan, name: str) -> None:
    body = body_of(plan)
    del body[name]
    with pytest.raises(PlanError, match=rf"malformed plan.*{name}"):
        ParallelPlan.from_json(sealed(body))


def test_fields_that_older_files_lack_take_their_defaults(plan: ParallelPlan) -> None:
    body = {name: value for name, value in body_of(plan).items() if name in REQUIRED}
    read = ParallelPlan.from_json(sealed(body))
    assert read.program == plan.program
    assert (read.warnings, read.memory_budget_bytes, read.details) == ((), inf, None)


@pytest.mark.parametrize("value", [None, "text", 3, [3], {"a": 1}, [None], [["a"]]], ids=str)
@pytest.mark.parametrize("name", ["inputs", "outputs", "program", "stages", "modules", "solver"])
def test_a_field_of_another_type(plan: ParallelPlan, name: str, value) -> None:
    with pytest.raises(PlanError):
        ParallelPlan.from_json(sealed({**body_of(plan), name: value}))


def set_at(body: Any, path: tuple[str | int, ...], value: Any) -> Any:
    body = copy.deepcopy(body)
    target = body
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    return body


WHOLE_2 = [WHOLE, WHOLE]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("inputs", 0, "layout"), [WHOLE], r"has the layout \(-1,\)"),
        (("inputs", 0, "layout"), [2, WHOLE], r"has the layout \(2, -1\)"),
        (("inputs", 0, "layout"), [-2, WHOLE], r"has the layout \(-2, -1\)"),
        (("inputs", 0, "layout"), None, r"malformed plan \(inputs\[0\].layout: None is not"),
        (("inputs", 0, "layout"), [0.0, WHOLE], "malformed"),
        (("inputs", 0, "layout"), [True, WHOLE], "malformed"),
        (("inputs", 0, "layout"), ["0", WHOLE], "malformed"),
        (("inputs", 0, "shape"), [7, 16], None),
        (("pinned",), [["*", "P('x', 1)"]], "malformed"),
        (("pinned",), [["*", "P(open('x'))"]], "malformed"),
        (("inputs", 0, "shape"), ["16", "16"], "malformed"),
        (("inputs", 0, "shape"), [16.0, 16], "malformed"),
        (("inputs", 0, "shape"), [-16, 16], "malformed"),
        (("outputs", 0, "layout"), [5, 5], r"has the layout \(5, 5\)"),
        (("mesh_shape",), [2], r"mesh \(2,\)"),
        (("mesh_shape",), [2, 0], r"mesh \(2, 0\)"),
        (("mesh_shape",), [float("inf"), 2], "malformed"),
        (("mesh_shape",), [2.5, 2], "malformed"),
        (("axis_names",), ["data"], "axes"),
        (("axis_names",), ["data", "data"], "axes"),
        (("axis_names",), ["data", "data", "model"], "axes"),
        (("program", "inputs"), [WHOLE_2], "3 inputs, 1 layouts"),
        (("program", "outputs"), [], "3 outputs, 0 layouts"),
        (("program", "inputs", 0), [WHOLE], r"a layout \(-1,\) for a mesh of 2 axes"),
        (("program", "outputs", 0), [[-2, WHOLE]], r"a layout \(-2, -1\)"),
        (("program", "outputs", 0), [None], "malformed"),
        (("program", "equations", 0, "results"), [[[0, 0, 0]]], r"a layout \(0, 0, 0\)"),
        (("program", "equations", 0, "operands"), [[[-3, 0]]], r"a layout \(-3, 0\)"),
        (("program", "equations", 0), {}, "malformed"),
        (("num_micro_batches",), "many", "malformed"),
        (("estimated_step_s",), None, "malformed"),
        (("stages", 0, "layers"), [0], "malformed"),
        (("fingerprint",), {}, "malformed"),
    ],
)
def test_a_sealed_plan_that_cannot_be(plan: ParallelPlan, path, value, message) -> None:
    if path[-1] == "shape" and message is None:  # 7 rows cannot lie on two devices each
        body = set_at(body_of(plan), ("inputs", 0, "layout"), [0, WHOLE])
        body, message = set_at(body, path, value), "is not divided evenly by its layout"
    else:
        body = set_at(body_of(plan), path, value)
    with pytest.raises(PlanError, match=message) as raised:
        ParallelPlan.from_json(sealed(body), where="forged.json")
    assert str(raised.value).startswith("forged.json: ")


def test_illegal_layouts_inside_a_loop(plan: ParallelPlan) -> None:
    body = body_of(plan)
    loop = next(i for i, e in enumerate(body["program"]["equations"]) if e["bodies"])
    inner = ("program", "equations", loop, "bodies", 0, "inputs", 0)
    with pytest.raises(PlanError, match=r"a layout \(0,\)"):
        ParallelPlan.from_json(sealed(set_at(body, inner, [0])))


def test_check_plan_takes_a_good_plan(plan: ParallelPlan) -> None:
    check_plan(plan)
    with pytest.raises(PlanError, match="mesh"):
        check_plan(replace(plan, axis_names=("data",)))


# -- saving


def test_save_into_a_folder_that_is_not_there(plan: ParallelPlan, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"the folder .*missing does not exist"):
        plan.save(tmp_path / "missing" / "plan.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("crash_in", ["write_bytes", "replace"])
def test_a_crash_while_saving_keeps_the_old_file(
    plan: ParallelPlan, tmp_path: Path, monkeypatch, crash_in: str
) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    newer = replace(plan, name="newer")
    real_write = Path.write_bytes

    def write_half(self: Path, content: bytes) -> int:
        real_write(self, content[: len(content) // 2])
        raise OSError("disk full")

    def crash(*_: Any) -> None:
        raise OSError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(Path, crash_in, write_half if crash_in == "write_bytes" else crash)
        with pytest.raises(OSError, match=r"disk full|power cut"):
            newer.save(path)
    assert ParallelPlan.load(path) == plan
    newer.save(path)
    assert ParallelPlan.load(path) == newer

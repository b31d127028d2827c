"""The catalogue: what a user writes by mistake, section by section.

A mistake is Python that follows `PRELUDE`, or a command line after `autopar`. `run.py` makes it and
returns the text that the user reads; `python -m tests.mistakes` writes them to docs/mistakes.md.
"""

# ruff: noqa: E501 (code stands as a user writes it)

from __future__ import annotations

from dataclasses import dataclass

PRELUDE = """\
import autopar
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

S = jax.ShapeDtypeStruct
params = {"up": S((64, 256), "float32"), "down": S((256, 64), "float32")}
batch = {"x": S((32, 64), "float32"), "y": S((32, 64), "float32")}
cluster = autopar.ClusterSpec(1, 8, "h100-sxm")


def loss_of(params, batch):
    hidden = jax.nn.relu(batch["x"] @ params["up"])
    return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)


def train_step(params, batch):
    loss, grads = jax.value_and_grad(loss_of)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss
"""


@dataclass(frozen=True)
class Mistake:
    """`code` follows the prelude; one that starts with `autopar ` is a command."""

    section: str
    title: str
    code: str


def _section(name: str, *mistakes: tuple[str, str]) -> list[Mistake]:
    return [Mistake(name, title, code.strip("\n")) for title, code in mistakes]


_PLAN = "autopar.plan(train_step, params, batch, cluster=cluster, method="

MISTAKES = (
    *_section(
        "Choosing a method",
        ("A class that needs arguments", _PLAN + "autopar.PipeshardParallel)"),
        ("The class `ManualParallel`", _PLAN + "autopar.ManualParallel)"),
        ("A name that is not one", _PLAN + '"fsdp")'),
        ("A name with a typing error", _PLAN + '"piepline")'),
        ("Options in place of a method", _PLAN + "autopar.ShardingOptions())"),
        ("A number in place of a method", _PLAN + "8)"),
        ("A mesh in place of a method", "autopar.parallelize(train_step, method=(2, 4))"),
        ("The path of a plan in place of the plan", 'autopar.parallelize(train_step, method="p.json")'),
        ("No micro-batches", "autopar.DataParallel(num_micro_batches=0)"),
        ("Micro-batches to be searched where they are not", 'autopar.ShardParallel(num_micro_batches="auto")'),
        ("More micro-batches than rows", _PLAN + "autopar.DataParallel(64))"),
        ("Micro-batches that do not divide the batch", _PLAN + "autopar.ShardParallel(num_micro_batches=5))"),
        ("A mesh of three axes", "autopar.ShardParallel(mesh_shape=(2, 2, 2))"),
        ("A mesh as text", 'autopar.ShardParallel(mesh_shape="2x4")'),
        ("A mesh with more devices than the cluster", _PLAN + "autopar.ShardParallel(mesh_shape=(4, 4)))"),
        ("A mesh with an empty axis", "autopar.ShardParallel(mesh_shape=(0, 8))"),
        ("Options as a dict", 'autopar.AutoParallel(options={"remat": "all"})'),
        ("An unknown schedule", 'autopar.PipeshardParallel(4, schedule="1f1b_flush")'),
        ("Stages as a number", "autopar.PipeshardParallel(4, stages=2)"),
        ("Layers as a number", "autopar.PipeshardParallel(4, layers=8)"),
        ("No stages", "autopar.UniformStages(0)"),
        ("Unknown submeshes", 'autopar.AutoStages(submeshes="any")'),
        ("Layers that are left out", "autopar.ManualStages([[0, 1], [3]], [(1, 4), (1, 4)])"),
        ("A stage without a submesh", "autopar.ManualStages([[0], [1]], [(1, 8)])"),
        ("A stage's mesh that is too small", "autopar.ManualStages([[0]], [(1, 8)], [(2, 2)])"),
        ("Layers by hand without any mark", _PLAN + "autopar.PipeshardParallel(4, layers=autopar.ManualLayers(), stages=autopar.UniformStages(2)))"),
        ("Axes and a mesh that differ", 'autopar.ManualParallel((2, 4), ("x",), None)'),
        ("An axis named twice", 'autopar.ManualParallel((2, 4), ("x", "x"), None)'),
        ("A spec with an unknown axis", _PLAN + 'autopar.ManualParallel((8,), ("x",), (P("z"), P("x"))))'),
        ("A spec for too many dimensions", _PLAN + 'autopar.ManualParallel((8,), ("x",), (P(None, None, "x"), None)))'),
        ("Specs that are not like the arguments", _PLAN + 'autopar.ManualParallel((8,), ("x",), (P("x"),)))'),
        ("Evaluation that follows a plain function", "autopar.FollowParallel(train_step)"),
        ("State for a plain function", "autopar.CreateStateParallel(train_step, batch)"),
        ("Evaluation that follows a step without a plan", """
step = autopar.parallelize(train_step)
autopar.parallelize(loss_of, method=autopar.FollowParallel(step)).plan(params, batch)"""),
    ),
    *_section(
        "Options of the solver",
        ("A time limit as text", 'autopar.ShardingOptions(planning_time_s="1m")'),
        ("No time for the solver", "autopar.ShardingOptions(solver_time_limit_s=0)"),
        ("An unknown kind of recomputation", 'autopar.ShardingOptions(remat="full")'),
        ("A budget as text", 'autopar.ShardingOptions(memory_budget_bytes="40GB")'),
        ("A negative number of plans to time", "autopar.ShardingOptions(rerank=-1)"),
        ("Plans timed where there are no devices", _PLAN + "autopar.ShardParallel(options=autopar.ShardingOptions(rerank=4)))"),
        ("A pin as text", """autopar.ShardingOptions(pins={"params['up']": "x"})"""),
        ("A pin that matches nothing", _PLAN + """autopar.ShardParallel(options=autopar.ShardingOptions(pins={"params['upp']": P("x")})))"""),
        ("A pin on an unknown axis", _PLAN + """autopar.ShardParallel(options=autopar.ShardingOptions(pins={"params['up']": P("model")})))"""),
        ("A pin that does not divide its array", """
odd = {"up": S((63, 256), "float32"), "down": S((256, 63), "float32")}
rows = {"x": S((32, 63), "float32"), "y": S((32, 63), "float32")}
options = autopar.ShardingOptions(pins={"params['up']": P("x")})
autopar.plan(train_step, odd, rows, cluster=cluster, method=autopar.ShardParallel((8,), options=options))"""),
        ("Forbidden axes as a list", 'autopar.ShardingOptions(forbid_axes=["y"])'),
        ("A switch that is not one", 'autopar.ShardingOptions(fold_layers="no")'),
        ("A budget that nothing fits into", _PLAN + "autopar.ShardParallel(options=autopar.ShardingOptions(memory_budget_bytes=1000)))"),
    ),
    *_section(
        "The step and its arguments",
        ("A result in place of the function", "autopar.parallelize(3)"),
        ("The method where the function belongs", "autopar.parallelize(autopar.DataParallel())"),
        ("A step that returns no state", """
def step(params, batch):
    loss, grads = jax.value_and_grad(loss_of)(params, batch)
    new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    return loss

autopar.plan(step, params, batch, cluster=cluster, method="data")"""),
        ("A step that returns nothing", "autopar.plan(lambda params, batch: None, params, batch, cluster=cluster)"),
        ("A step without arguments", "autopar.plan(lambda: jnp.ones(3), cluster=cluster)"),
        ("Text in the batch", """
def step(params, batch):
    return train_step(params, batch)

autopar.plan(step, params, "train.txt", cluster=cluster)"""),
        ("Objects in the batch", """
import numpy as np
rows = {"x": np.array([None] * 4, object), "y": batch["y"]}
autopar.plan(train_step, params, rows, cluster=cluster)"""),
        ("An unhashable static argument", """
def step(params, batch, options):
    return train_step(params, batch)

autopar.plan(step, params, batch, ["fast"], cluster=cluster, static_argnums=2)"""),
        ("Static arguments by name", 'autopar.parallelize(train_step, static_argnums="options")'),
        ("A negative position", "autopar.parallelize(train_step, batch_argnums=-1)"),
        ("Positions to donate by name", 'autopar.parallelize(train_step, donate_argnums="state")'),
        ("A batch argument that is not there", "autopar.parallelize(train_step, batch_argnums=5).plan(params, batch)"),
        ("A mutable array", """
def step(params, batch):
    total = jax.new_ref(jnp.zeros(()))
    total[...] = loss_of(params, batch)
    return params, total[...]

autopar.plan(step, params, batch, cluster=cluster)"""),
        ("A name that is not text", "autopar.constrain(jnp.ones(3), 7)"),
        ("A rule that is not one", 'autopar.register_rule("my_kernel", "b s h")'),
        ("A misspelt function of autopar", "autopar.paralelize"),
    ),
    *_section(
        "Clusters and devices",
        ("An unknown device", 'autopar.ClusterSpec(1, 8, "h100")'),
        ("A cluster without hosts", "autopar.ClusterSpec(0, 8)"),
        ("Half a device", "autopar.ClusterSpec(1, 0.5)"),
        ("Text in place of a cluster", 'autopar.plan(train_step, params, batch, cluster="1x8")'),
        ("A profile that is not there", 'autopar.ClusterSpec(1, 8, "h100-sxm", profile="my.json")'),
        ("An unknown kind of cluster", 'autopar.init(cluster="slurm")'),
        ("Devices as a number", "autopar.init(devices=4)"),
        ("A device given twice", "autopar.init(devices=[jax.devices()[0], jax.devices()[0]])"),
        ("A mesh without axes", "autopar.LogicalMesh(())"),
        ("A mesh with too few names", 'autopar.LogicalMesh((2, 4), axis_names=("x",))'),
        ("A cluster in place of a mesh", "autopar.solve_sharding(train_step, params, batch, mesh=cluster)"),
    ),
    *_section(
        "Plans",
        ("A plan that is not there", 'autopar.ParallelPlan.load("plan.json")'),
        ("A file that is no plan", """
with open("notes.json", "w") as file:
    file.write('{"a": 1}')
autopar.ParallelPlan.load("notes.json")"""),
        ("A plan that was edited", """
plan = autopar.plan(train_step, params, batch, cluster=cluster, method="data")
text = plan.to_json().replace('"num_micro_batches": 1', '"num_micro_batches": 2').replace('"num_micro_batches":1', '"num_micro_batches":2')
autopar.ParallelPlan.from_json(text)"""),
        ("A plan for another model", """
plan = autopar.plan(train_step, params, batch, cluster=cluster, method="data")

def other(weights, rows):
    return {n: w - jnp.mean(rows) for n, w in weights.items()}, jnp.mean(rows)

weights = {"kernel": S((8, 8), "float32"), "bias": S((8,), "float32")}
autopar.plan(other, weights, S((16, 8), "float32"), cluster=cluster, method=plan)"""),
        ("A plan for another size of the model", """
plan = autopar.plan(train_step, params, batch, cluster=cluster, method="data")
larger = {"up": S((64, 512), "float32"), "down": S((512, 64), "float32")}
autopar.plan(train_step, larger, batch, cluster=cluster, method=plan)"""),
        ("A plan for another batch", """
plan = autopar.plan(train_step, params, batch, cluster=cluster, method="data")
more = {"x": S((64, 64), "float32"), "y": S((64, 64), "float32")}
autopar.plan(train_step, params, more, cluster=cluster, method=plan)"""),
        ("A plan for another version of the step", """
plan = autopar.plan(train_step, params, batch, cluster=cluster, method="data")

def step(params, batch):
    new, loss = train_step(params, batch)
    return new, 2 * loss

autopar.plan(step, params, batch, cluster=cluster, method=plan)"""),
        ("A plan saved into a folder that is not there", """
plan = autopar.plan(train_step, params, batch, cluster=cluster, method="data")
plan.save("plans/today/plan.json")"""),
        ("An array that is not there", """
plan = autopar.plan(train_step, params, batch, cluster=cluster, method="data")
plan.explain("params['upp']")"""),
        ("A pattern for arrays of several shapes", """
plan = autopar.plan(train_step, params, batch, cluster=cluster, method="data")
plan.explain("params*")"""),
        ("No levels of modules", """
plan = autopar.plan(train_step, params, batch, cluster=cluster, method="data")
plan.explain(depth=0)"""),
        ("A pin for a plan from a file", """
plan = autopar.plan(train_step, params, batch, cluster=cluster, method="shard")
autopar.ParallelPlan.from_json(plan.to_json()).with_pins({"params['up']": P("x")})"""),
        ("A pin as text for a plan", """
plan = autopar.plan(train_step, params, batch, cluster=cluster, method="shard")
plan.with_pins({"params['up']": "x"})"""),
        ("A plan compared with text", """
plan = autopar.plan(train_step, params, batch, cluster=cluster, method="data")
autopar.diff(plan, "plan.json")"""),
        ("A plan compiled without a plan", "autopar.compile(train_step, params, batch, plan=None)"),
    ),
    *_section(
        "Training, data and checkpoints",
        ("No steps between checkpoints", 'autopar.run_training(train_step, params, [], checkpoint_dir="run", checkpoint_every=0)'),
        ("A step that does not return the state", """
state = jnp.zeros(3)
autopar.run_training(lambda state, batch: batch, state, [jnp.ones(2)], checkpoint_dir="run")"""),
        ("A run that is finished", """
def step(state, batch):
    return state + batch, jnp.sum(batch)

for _ in range(2):
    autopar.run_training(step, jnp.zeros(3), [jnp.ones(3)] * 2, checkpoint_dir="run")"""),
        ("A checkpoint that is not there", 'autopar.restore_checkpoint("no_such_run", {"w": jnp.zeros(3)})'),
        ("A checkpoint of another model", """
autopar.save_checkpoint("run", {"w": jnp.zeros(3)}, step=1)
autopar.restore_checkpoint("run", {"kernel": jnp.zeros(3)})"""),
        ("A checkpoint of another size", """
autopar.save_checkpoint("run", {"w": jnp.zeros(3)}, step=1)
autopar.restore_checkpoint("run", {"w": jnp.zeros(4)})"""),
        ("A checkpoint of a step that was not saved", """
autopar.save_checkpoint("run", {"w": jnp.zeros(3)}, step=1)
autopar.restore_checkpoint("run", {"w": jnp.zeros(3)}, step=2)"""),
        ("A negative step", 'autopar.save_checkpoint("run", {"w": jnp.zeros(3)}, step=-1)'),
        ("A trace that is not there", 'autopar.read_trace("trace.json")'),
    ),
    *_section(
        "The command line",
        ("A factory without its function", "autopar plan train.py --cluster 1x8"),
        ("A file that is not there", "autopar plan train.py:make_step --cluster 1x8"),
        ("An unknown size of an example", "autopar plan examples.llama:make_step --cluster 1x8 --set size=huge"),
        ("An option that the factory does not have", "autopar plan examples.gpt:make_step --cluster 1x8 --set szie=tiny"),
        ("An option without a value", "autopar plan examples.gpt:make_step --cluster 1x8 --set size"),
        ("A cluster without devices", "autopar plan examples.gpt:make_step --cluster 8"),
        ("An unknown device", "autopar plan examples.gpt:make_step --cluster 1x8:h100"),
        ("An unknown method", "autopar plan examples.gpt:make_step --cluster 1x8 --method fsdp --set size=tiny"),
        ("A budget without a unit", "autopar plan examples.gpt:make_step --cluster 1x8 --budget 40 --set size=tiny"),
        ("Stages without micro-batches", "autopar plan examples.gpt:make_step --cluster 1x8 --method pipeline --stages 2 --set size=tiny"),
        ("A flag of another method", "autopar plan examples.gpt:make_step --cluster 1x8 --method data --schedule gpipe --set size=tiny"),
        ("A folder that is not there", "autopar plan examples.gpt:make_step --cluster 1x8 --save plans/today/plan.json"),
        ("A plan that is not there", "autopar explain plan.json"),
        ("A report of no plan", "autopar report plan.json"),
        ("A misspelt command", "autopar dmeo"),
        ("A sweep in which nothing varies", "autopar sweep examples.gpt:make_step --cluster 1x8"),
        ("A sweep over something that is no number", "autopar sweep examples.gpt:make_step --cluster 1x8 --devices 4,x"),
        ("Micro-batches as text", "autopar plan examples.gpt:make_step --cluster 1x8 --micro-batches many"),
    ),
)  # fmt: skip

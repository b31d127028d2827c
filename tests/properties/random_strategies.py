"""Programs run with a strategy for every node that is drawn by lot instead of solved for."""

from __future__ import annotations

import random
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

import autopar
from autopar import _jax
from autopar.ir.spec import PARTIAL, to_partition_spec
from autopar.lower.annotate import annotated_function
from autopar.lower.assign import assign_layouts
from autopar.sharding.strategies import enumerate_strategies
from autopar.tracer.build import build_graph
from autopar.tracer.trace_step import trace_step
from tests.properties.random_programs import RandomProgram


def run_by_any_strategies(program: RandomProgram, mesh_shape: tuple[int, ...], seed: int) -> Any:
    """The program's results on a mesh, whatever strategy each node takes, good or bad."""
    floats, ints = program.inputs()
    step = trace_step(program, (floats, ints))
    graph = build_graph(step)
    rng = random.Random(seed)
    logical = autopar.LogicalMesh(mesh_shape)
    layouts = []
    for node in graph.nodes:
        strategies = [
            s
            for s in enumerate_strategies(node.rule, mesh_shape)
            if not any(PARTIAL in layout for layout in s.operands)
        ]
        strategy = rng.choice(strategies)
        layouts.append((strategy.operands, strategy.results))
    sharding = assign_layouts(step.program, graph, layouts, logical)
    devices = np.array(jax.devices()[: logical.num_devices]).reshape(mesh_shape)
    mesh = _jax.fresh_mesh(devices, logical.axis_names)
    in_shardings = [
        NamedSharding(mesh, to_partition_spec(layout or (), len(aval.shape), mesh.axis_names))
        for layout, aval in zip(sharding.inputs, step.avals, strict=True)
    ]
    function = annotated_function(step.program, sharding, mesh)
    results = jax.jit(function, in_shardings=in_shardings)(*floats, *ints)
    return step.rebuild_output(results)

"""Primitives without a case, and why a train step under autopar cannot have them, or what tests
them instead. Some exist only in some of the supported releases of JAX."""

from __future__ import annotations

from tests.operators.primitives import primitives

_KERNEL = "only inside Pallas kernels, which autopar runs as they are (`pallas_call`)"
_EXPLICIT = "only where mesh axes are explicit; autopar's meshes leave them to the partitioner"
_ASYNC = "half of an asynchronous collective inside `shard_map`; only for accelerators"
_CUDNN = "cuDNN's, needs a GPU: tests/unit/tracer/test_rules.py, tests/gpu"
_POLYMORPHIC = "only where shapes are symbolic (`jax.export`); autopar's are static"
_TOKEN = "orders effects by tokens, which are no arrays"
_LOWERED = "appears only when another primitive is lowered"
_HIGH = "an experiment (`jax.experimental.hijax`): a user's own types and primitives"
_LEGACY = "no longer bound by any public function"
_REFERENCE = "only inside kernels"
_MUTABLE = "changes a mutable array, which autopar refuses with a `TraceError` that names the line"
_MULHI = "XLA cannot compile `mulhi` for several devices, under plain `jax.jit` either (JAX 0.12)"
_GPU = "inside `shard_map`; XLA compiles it for GPUs and TPUs only"

EXCLUDED: dict[str, str] = {
    "accum_grad_in_ref": "only while JAX differentiates with respect to references",
    "addupdate": _MUTABLE,
    "after_all": _TOKEN,
    "all_gather_done": _ASYNC,
    "all_gather_reduced": _EXPLICIT,
    "all_gather_reduced_start": _ASYNC,
    "all_gather_start": _ASYNC,
    "all_to_all_done": _ASYNC,
    "all_to_all_start": _ASYNC,
    "box_get": _HIGH,
    "box_set": _HIGH,
    "broadcast_to": _KERNEL,
    "call": "bound only by `core.call`, of which JAX leaves no equation in a step",
    "call_hi_primitive": _HIGH,
    "call_hi_primitive_linearized": _HIGH,
    "check": "`checkify.checkify` turns it into values before the step is traced",
    "core_map": _KERNEL,
    "create_linear": _REFERENCE,
    "create_token": _TOKEN,
    "custom_jvp_call_jaxpr": _LEGACY,
    "custom_lin": "only while JAX linearizes; none is left in a step",
    "dce_sink": "for tests of JAX itself; has no result",
    "delay": _KERNEL,
    "dim_as_value": _POLYMORPHIC,
    "dimension_size": _POLYMORPHIC,
    "dot_product_attention_bwd": _CUDNN,
    "dot_product_attention_bwd_wrapper": _CUDNN,
    "dot_product_attention_fp8_bwd": _CUDNN,
    "dot_product_attention_fp8_bwd_wrapper": _CUDNN,
    "dot_product_attention_fp8_fwd": _CUDNN,
    "dot_product_attention_fp8_fwd_wrapper": _CUDNN,
    "dot_product_attention_fwd": _CUDNN,
    "dot_product_attention_fwd_wrapper": _CUDNN,
    "empty2": _KERNEL,
    "empty_ref": _REFERENCE,
    "free_ref": _REFERENCE,
    "freeze": _MUTABLE,
    "from_edtype": _HIGH,
    "get": _MUTABLE,
    "get_global": _KERNEL,
    "iota_2x32_shape": _LOWERED,
    "jaxpr_call": _KERNEL,
    "log_extend": _HIGH,
    "log_read": _HIGH,
    "masked_load": _KERNEL,
    "masked_swap": _KERNEL,
    "mulhi": _MULHI,
    "multiple_of": _KERNEL,
    "new_box": _HIGH,
    "new_log": _HIGH,
    "new_ref": _MUTABLE,
    "num_programs": _KERNEL,
    "pbroadcast": _GPU,
    "pbroadcast_done": _ASYNC,
    "pbroadcast_dynamic": _ASYNC,
    "pbroadcast_start": _ASYNC,
    "philox2x32": _MULHI,
    "philox4x32": _MULHI,
    "pin": _REFERENCE,
    "ppermute_done": _ASYNC,
    "ppermute_start": _ASYNC,
    "precv": _ASYNC,
    "preduced": _EXPLICIT,
    "program_id": _KERNEL,
    "program_order": _TOKEN,
    "psend": _ASYNC,
    "psum_done": _ASYNC,
    "psum_invariant_start": _ASYNC,
    "psum_start": _ASYNC,
    "ragged_all_to_all": _GPU,
    "reciprocal": _KERNEL,
    "reduce_scatter_done": _ASYNC,
    "reduce_scatter_start": _ASYNC,
    "reduced_vary_cast": _EXPLICIT,
    "reduced_vary_cast_p": _EXPLICIT,
    "relayout": "fixes the order of bytes in memory, which autopar leaves to XLA",
    "reshard": _EXPLICIT,
    "run_scoped": _KERNEL,
    "run_state": _KERNEL,
    "scaled_matmul": _CUDNN,
    "scaled_matmul_wrapper": _CUDNN,
    "select_and_scatter": _LEGACY,
    "semaphore_read": _KERNEL,
    "semaphore_signal": _KERNEL,
    "semaphore_wait": _KERNEL,
    "shape_assertion": _POLYMORPHIC,
    "stage": "lifts a Python number into a trace and leaves no equation",
    "swap": _MUTABLE,
    "to_edtype": _HIGH,
    "unpin": _REFERENCE,
    "unreachable": "stands for a derivative that must not be taken",
    "unreduced_pmax": _EXPLICIT,
    "unreduced_pmin": _EXPLICIT,
    "unreduced_psum": _EXPLICIT,
    "unreduced_psum_start": _ASYNC,
    "unreduced_reduce_scatter": _EXPLICIT,
    "unreduced_reduce_scatter_start": _ASYNC,
    "vary_unreduced_cast": _EXPLICIT,
    "vary_unreduced_cast_p": _EXPLICIT,
    "with_memory_space_constraint": _KERNEL,
    "zeros_like": _LEGACY,
}
if "closed_call" in primitives():  # JAX 0.10
    EXCLUDED["eval_jaxpr"] = "leaves a `closed_call` when it is traced"

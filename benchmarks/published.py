"""Figures that others measured and published, with their sources, for comparison with ours.

`PUBLISHED` has TFLOPS per GPU on clusters of p3.16xlarge: 8 V100s of 16 GB to a host, 25 Gb/s
between hosts, global batches of 1024 sequences or 1536 images. They come from "Alpa: Automating
Inter- and Intra-Operator Parallelism for Distributed Deep Learning" (Zheng et al., OSDI '22,
section 8.1): its own system and the baselines that it ran there, Megatron-LM for GPT, DeepSpeed for
MoE, pipeline and data parallelism for Wide-ResNet.

**Which flops they count.** The benchmark code published with the paper
(github.com/alpa-projects/alpa, `benchmark/alpa`) has `use_remat = True` in all suites of GPT and
MoE and then counts the forward pass twice: 96 B S L H² (1 + S / 6H) + 6 B S H V for GPT, after
Megatron-LM (Narayanan et al., SC '21). A plan that recomputes less does fewer flops for the same
tokens, so its own flops per second would say nothing. `published_flops` therefore returns the flops
of that count, whatever a plan recomputes: divided by seconds and GPUs, they are tokens per second
in the paper's unit. For Wide-ResNet the paper counts XLA's flops of the compiled program; we count
all convolutions, forward once and backward twice. The two may differ by a few percent.

**What those models held.** GPT: float16 parameters, a float32 copy, Adam's moments in float32
(the same `benchmark/alpa`, `create_train_state`). MoE: float16 parameters and a float32 copy with
*Adafactor*, whose state is a row and a column of every matrix. With Adam, 70 billion parameters
take 16 bytes each with their gradients, 17.6 GB on each of 64 GPUs that have 16.9. Wide-ResNet:
float32, SGD with momentum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from examples.models import Example

ALPA = "Alpa"
PAPER = "Alpa, OSDI '22, section 8.1"


@dataclass(frozen=True)
class Measured:
    """Measured TFLOPS per GPU; None where the run failed.

    plan:  Alpa's plan, as far as its published `suite_auto_*.py` gives it.
    """

    gpus: int
    alpa: float
    baseline: str
    theirs: float | None
    plan: str = ""


MEGATRON, DEEPSPEED, PP_DP = "Megatron-LM", "DeepSpeed", "pipeline + data"

PUBLISHED: dict[str, Measured] = {
    "gpt-350m": Measured(1, 45.1, MEGATRON, 47.5, "512 micro-batches"),
    "gpt-760m": Measured(2, 57.9, MEGATRON, 55.5, "2 stages of 1, 128 micro-batches"),
    "gpt-1.3b": Measured(4, 58.2, MEGATRON, 55.9, "2 stages of 2 as (2, 1), 128 micro-batches"),
    "gpt-2.6b": Measured(8, 61.6, MEGATRON, 50.4, "3 stages of 2, 2 and 4, 128 micro-batches"),
    "gpt-6.7b": Measured(16, 60.0, MEGATRON, 56.6, "2 stages of 8 as (2, 4), 64 micro-batches"),
    "gpt-15b": Measured(32, 59.9, MEGATRON, 58.2, "4 stages of 8 as (2, 4), 128 micro-batches"),
    "gpt-39b": Measured(64, 57.0, MEGATRON, 57.8, "16 stages of 4 as (1, 4), 1024 micro-batches"),
    "moe-380m": Measured(1, 45.5, DEEPSPEED, 34.2, "512 micro-batches"),
    "moe-690m": Measured(2, 43.0, DEEPSPEED, 33.1, "one mesh (2, 1), 32 micro-batches"),
    "moe-1.3b": Measured(4, 39.9, DEEPSPEED, 34.7, "2 stages of 2 as (2, 1), 32 micro-batches"),
    "moe-2.4b": Measured(8, 45.8, DEEPSPEED, 40.0, "2 stages of 4 as (4, 1), 32 micro-batches"),
    "moe-10b": Measured(16, 45.4, DEEPSPEED, 12.9, "2 stages of 8 as (8, 1), 16 micro-batches"),
    "moe-27b": Measured(32, 38.8, DEEPSPEED, 3.8, "8 stages of 4 as (4, 1), 128 micro-batches"),
    "moe-70b": Measured(64, 36.6, DEEPSPEED, None, "8 stages of 8 as (8, 1), 64 micro-batches"),
    "wresnet-250m": Measured(1, 8.3, PP_DP, 8.3, "24 micro-batches"),
    "wresnet-500m": Measured(2, 8.5, PP_DP, 8.2, "one mesh (1, 2), 24 micro-batches"),
    "wresnet-1b": Measured(4, 8.2, PP_DP, 8.1, "one mesh (1, 4), 24 micro-batches"),
    "wresnet-2b": Measured(8, 8.0, PP_DP, 7.7, "2 stages of 4 as (4, 1), (1, 4), 24 micro-batches"),
    "wresnet-4b": Measured(16, 6.8, PP_DP, 0.4, "3 stages of 4, 4 and 8, 32 micro-batches"),
    "wresnet-6.8b": Measured(32, 6.6, PP_DP, None, "4 stages of 8 as (8, 1), 32 micro-batches"),
    "wresnet-13b": Measured(64, 5.3, PP_DP, None, "8 stages of 8, 38 micro-batches of 40"),
}

# Bytes of a 16 GB V100 by its driver (`autopar/measure/verify/gpu_targets/v100-16gb.txtpb`).
V100_MEMORY_BYTES = 16_935_682_048

# Llama2-7B on 8 H100s, fully sharded: tokens per second and GPU, about 46 % of peak.
MAXTEXT_LLAMA2_7B_TOKENS_S = 11_400
MAXTEXT = "MaxText, FSDP on 8 H100"


def published_flops(example: Example) -> float:
    """Flops of a step as the published figures count them (see the module docstring)."""
    config: Any = example.config
    family = example.name.split("-")[0]
    if family == "wresnet":
        return float(example.flops_per_step())
    tokens = example.batch_size * config.seq_len
    hidden, layers, seq = config.hidden_size, config.num_layers, config.seq_len
    head = 6 * tokens * hidden * config.vocab_size
    if family == "gpt":
        return 96 * tokens * layers * hidden**2 * (1 + seq / (6 * hidden)) + head
    if family != "moe":
        raise ValueError(f"no published count is known for {example.name!r}")
    attention = 8 * hidden**2 + 4 * seq * hidden
    ffn = 4 * config.ffn_multiplier * hidden**2
    slots = 2 * config.group_size  # two experts have room for each token
    routing = 2 * hidden * config.num_experts + 2 * slots + 4 * hidden * slots
    pair = 2 * attention + ffn + 2 * ffn + routing
    return 4 * tokens * layers / 2 * pair + head

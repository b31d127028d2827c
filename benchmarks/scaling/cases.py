"""Which model is planned for which cluster: the rows of the benchmark, most telling first.

V100: the models of the Alpa paper on as many GPUs as in the paper, in its configuration: GPT with
Adam, MoE with Adafactor, attention as products. H100 (DGX): the same models from 8 GPUs on; beyond
64 GPUs the largest model stays and the batch grows with the GPUs. There GPT, MoE and Llama have
fused attention and Adam. Llama2-7B has 4 sequences of 4096 tokens per GPU.

The planner decides everything except for Wide-ResNet: BatchNorm has other statistics in
micro-batches, so the planner never splits that batch by itself; we give two numbers of
micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import autopar
from autopar.errors import ArgumentError
from benchmarks.published import PUBLISHED, V100_MEMORY_BYTES
from examples.models import Example, build

DEVICES_PER_HOST = 8
FUSED = {"attention": "cudnn"}


@dataclass(frozen=True)
class Case:
    """One model on one cluster.

    cluster:       "v100" or "h100".
    batch_size:    of all GPUs together; None for the paper's.
    micro_batches: the requested number; None leaves it to the planner.
    """

    cluster: str
    model: str
    gpus: int
    batch_size: int | None = None
    micro_batches: int | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def family(self) -> str:
        return self.model.split("-")[0]

    @property
    def name(self) -> str:
        cut = "" if self.micro_batches is None else f"-m{self.micro_batches}"
        return f"{self.cluster}-{self.gpus}-{self.model}{cut}"

    def example(self) -> Example:
        return build(self.model, self.batch_size, **self.overrides)

    def cluster_spec(self) -> autopar.ClusterSpec:
        hosts, per_host = max(1, self.gpus // DEVICES_PER_HOST), min(self.gpus, DEVICES_PER_HOST)
        if self.cluster == "v100":
            return autopar.ClusterSpec(hosts, per_host, "v100", memory_bytes=V100_MEMORY_BYTES)
        return autopar.ClusterSpec(hosts, per_host, "h100-sxm")

    def method(self) -> autopar.AutoParallel | autopar.PipeshardParallel:
        """The default method. On one GPU, where it would change nothing, a pipeline of one stage,
        so that micro-batches and recomputation are searched there too."""
        number = self.micro_batches or "auto"
        if self.gpus == 1:
            return autopar.PipeshardParallel(number)
        return autopar.AutoParallel(num_micro_batches=number)


def _v100(model: str) -> list[Case]:
    gpus = PUBLISHED[model].gpus
    if model.startswith("wresnet"):
        return [Case("v100", model, gpus, micro_batches=n) for n in (32, 64)]
    overrides = {"optimizer": "adafactor"} if model.startswith("moe") else {}
    return [Case("v100", model, gpus, overrides=overrides)]


_GPT = {8: "gpt-2.6b", 16: "gpt-6.7b", 32: "gpt-15b", 64: "gpt-39b"}
_MOE = {8: "moe-2.4b", 16: "moe-10b", 32: "moe-27b", 64: "moe-70b"}
_WRESNET = {8: "wresnet-2b", 16: "wresnet-4b", 32: "wresnet-6.8b", 64: "wresnet-13b"}
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)


def _growing(models: dict[int, str], gpus: int, batch: int) -> tuple[str, int]:
    """The model for this number of GPUs, and its batch: beyond the largest model, the batch
    grows."""
    most = max(models)
    return models[min(gpus, most)], batch * max(1, gpus // most)


def _h100(gpus: int) -> list[Case]:
    gpt, gpt_batch = _growing(_GPT, gpus, 1024)
    moe, moe_batch = _growing(_MOE, gpus, 1024)
    wresnet, images = _growing(_WRESNET, gpus, 1536)
    return [
        Case("h100", gpt, gpus, gpt_batch, overrides=FUSED),
        Case("h100", "llama2-7b", gpus, 4 * gpus, overrides=FUSED),
        Case("h100", moe, gpus, moe_batch, overrides=FUSED),
        *(Case("h100", wresnet, gpus, images, micro_batches=n) for n in (8, 16)),
    ]


def _ordered() -> list[Case]:
    """GPT and MoE before Wide-ResNet, cases with published measurements before others, and large
    clusters, which take longest, before small ones."""
    found = [case for model in PUBLISHED for case in _v100(model)]
    found += [case for gpus in GPUS for case in _h100(gpus)]
    return sorted(found, key=_late)


def _late(case: Case) -> tuple[bool, bool, int]:
    is_wresnet = case.family == "wresnet"
    return is_wresnet, is_wresnet and case.cluster == "h100", -case.gpus


CASES: dict[str, Case] = {case.name: case for case in _ordered()}


def chosen(only: Sequence[str] | None) -> list[Case]:
    """Cases with a given name, or with a given part of it ("v100", "gpt", "1024")."""
    for text in only or ():
        if not any(_is_part(text, case) for case in CASES.values()):
            raise ArgumentError(
                f"only={text!r}: no case of the scaling benchmark matches. Give a cluster "
                "(v100, h100), a family (gpt, moe, wresnet, llama2), a model, a number of GPUs, or "
                f"a name such as {next(iter(CASES))!r}; --list shows all."
            )
    return matching(only)


def matching(only: Sequence[str] | None) -> list[Case]:
    if not only:
        return list(CASES.values())
    return [case for case in CASES.values() if any(_is_part(text, case) for text in only)]


def _is_part(text: str, case: Case) -> bool:
    parts = {case.name, case.cluster, case.family, case.model, str(case.gpus)}
    return text in parts or text == f"{case.cluster}-{case.family}"

"""Kernels of made-up programs, for the tests of the judge."""

from __future__ import annotations

from autopar.ir.devices import DeviceSpec
from autopar.measure.judge_kernels import work_of
from autopar.measure.judge_traffic import Work
from autopar.runtime.hlo_text import HloModule

DEVICE = DeviceSpec(
    "made-up",
    flops_16bit=1e15,
    flops_32bit=5e14,
    memory_bytes=1e11,
    memory_bandwidth=4e12,
    intra_host_bandwidth=1e11,
    host_bandwidth=1e11,
)
COMBINERS = "".join(
    f"%{name} (x: f32[], y: f32[]) -> f32[] {{\n  ROOT %s = f32[] {opcode}(%x, %y)\n}}\n"
    for name, opcode in (("add", "add"), ("largest", "maximum"))
)


def work(entry: str, inner: str = "") -> Work:
    """Of the entry's last instruction."""

    def lines(text: str) -> str:
        return "\n".join(f"  {line.strip()}" for line in text.strip().splitlines())

    fused = f"%fused (a: f32[8]) -> f32[8] {{\n{lines(inner)}\n}}\n" if inner else ""
    text = f"HloModule m, is_scheduled=true\n\n{COMBINERS}\n{fused}\n"
    module = HloModule(f"{text}ENTRY %main (p: f32[8]) -> f32[8] {{\n{lines(entry)}\n}}\n")
    listed = module.computations[module.entry]
    return work_of(listed[-1], module, {one.name: one for one in listed}, DEVICE)


def fusion(inner: str, result: str, *operands: str, kind: str = "kLoop", config: str = "") -> Work:
    given = [f"%p{n} = {operand} parameter({n})" for n, operand in enumerate(operands)]
    names = ", ".join(f"%p{n}" for n in range(len(operands)))
    root = f"ROOT %f = {result} fusion({names}), kind={kind}, calls=%fused{config}"
    return work("\n".join([*given, root]), inner)

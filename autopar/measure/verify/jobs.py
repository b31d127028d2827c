"""What a compiling process is given, and what it finds: `CompileJob` and `ProgramCosts`."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.remote import ProgramSpec


@dataclass(frozen=True)
class CompileJob:
    """A program to compile.

    program:  as bytes of `jax.export`.
    topology: hosts, devices per host, of the mesh that it runs on.
    hlo_file: where to write XLA's optimized HLO; nowhere if empty.
    """

    name: str
    spec: ProgramSpec
    program: bytes
    topology: tuple[int, int]
    target_config: str
    hlo_file: str = ""


@dataclass(frozen=True)
class Collectives:
    """All collectives of one kind: how many, and the bytes that a device sends in them."""

    kind: str
    count: float
    sent_bytes: float


@dataclass(frozen=True)
class ProgramCosts:
    """What XLA says of a compiled program, of one device and one run. Outputs that lie in donated
    arguments are counted in both, and once more in `alias_bytes`."""

    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int
    collectives: tuple[Collectives, ...]
    dot_flops: float
    seconds: float  # that XLA took

    @property
    def peak_bytes(self) -> int:
        return self.argument_bytes + self.output_bytes + self.temp_bytes - self.alias_bytes

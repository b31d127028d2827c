"""Layouts on a program, for an equal one."""

from __future__ import annotations

from autopar.ir.program_sharding import EquationSharding, ProgramSharding, Refetch, renumbered


def program(after: int, inner: int) -> ProgramSharding:
    """A loop, before and in which an operand is resharded again."""
    chains = (((0,), (-1,)),)
    body = ProgramSharding(
        ((0,),), (EquationSharding(chains, ((),), refetched=(Refetch(0, 1, inner),)),), ((),)
    )
    loop = EquationSharding(((),), ((),), (body,))
    again = EquationSharding(chains, ((),), refetched=(Refetch(0, 0, after),))
    return ProgramSharding(((0,),), (again, loop), (((0,),),))


def test_values_are_those_of_the_other_program() -> None:
    assert renumbered(program(3, 5), {3: 7, 5: 11}) == program(7, 11)


def test_equations_that_name_no_value_are_shared() -> None:
    plain = EquationSharding((((0,),),), ((),))
    found = renumbered(ProgramSharding(((0,),), (plain,), ((),)), {})
    assert found.equations[0] is plain

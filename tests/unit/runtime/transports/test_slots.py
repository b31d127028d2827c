from __future__ import annotations

from autopar.runtime.transports.slots import StagingSlots


def make():
    sizes: list[int] = []

    def allocate(num_bytes):
        sizes.append(num_bytes)
        return 1000 * len(sizes), f"handle {len(sizes)}"

    return StagingSlots(allocate), sizes


def test_a_slot_that_was_given_back_is_used_again():
    slots, sizes = make()
    for _ in range(10):
        slots.give_back(slots.take(3 * 2**20))
    assert sizes == [4 * 2**20]


def test_nobody_shares_a_slot_that_is_in_use():
    slots, sizes = make()
    taken = [slots.take(100) for _ in range(3)]
    assert len({slot.pointer for slot in taken}) == 3
    assert len({slot.handle for slot in taken}) == 3
    assert len(sizes) == 3


def test_what_fits_best_is_taken():
    slots, _ = make()
    large, small = slots.take(8 * 2**20), slots.take(2**20)
    slots.give_back(large)
    slots.give_back(small)
    assert slots.take(2**20) == small
    assert slots.take(2**20) == large
    slots.give_back(small)
    assert slots.take(3 * 2**20) not in (small, large)


def test_all_slots_are_drained_also_those_in_use():
    slots, _ = make()
    taken = [slots.take(1), slots.take(1)]
    slots.give_back(taken[0])
    assert slots.drain() == taken
    assert slots.drain() == []

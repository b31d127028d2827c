"""Memory that nobody uses goes back to the operating system."""

import gc
import os
import platform
from pathlib import Path

import pytest

from autopar.runtime.host_heap import release_unused_memory

BLOCK_BYTES, NUM_BLOCKS = 60_000, 2000


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's heap")
def test_free_blocks_below_one_that_is_in_use_go_back():
    blocks = [bytearray(BLOCK_BYTES) for _ in range(NUM_BLOCKS)]
    last = blocks.pop()  # at the end of the heap, which glibc therefore cannot shorten
    blocks.clear()
    before = resident_bytes()
    release_unused_memory()
    assert before - resident_bytes() > 0.8 * BLOCK_BYTES * NUM_BLOCKS
    assert len(last) == BLOCK_BYTES


def test_cycles_are_collected():
    class Node:
        count = 0

        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            Node.count += 1

    gc.disable()
    try:
        Node()
        assert Node.count == 0
        release_unused_memory()
        assert Node.count == 1
    finally:
        gc.enable()

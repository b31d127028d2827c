"""Stands in for CuPy where there is no GPU: the calls that transports make, on memory of the host.

A stream is a thread, memory that other processes map is a file, and so are NCCL's messages, all in
the folder AUTOPAR_FAKE_CUDA. It shows that both sides of a transport agree, and where they would
wait for each other; what CUDA does, only a GPU shows.
"""

from cupy import cuda

__all__ = ["cuda"]

"""Fourier transforms as cuFFT makes them: from a kind and lengths to bytes of traffic.

A transform is a few passes over its arrays, and a pass reads and writes them once:

    a dimension       one pass if its length is a product of small primes, a little slower where it
                      is no power of two or not the last dimension; a large prime has a slow pass of
                      its own; a very large one is a convolution (Bluestein's algorithm)
    real numbers      the last dimension of an odd length is packed before and unpacked after; of
                      an even one, half as many complex numbers are transformed
    back from complex to real, the operand is copied first, as cuFFT overwrites it
    inverse           a last pass scales the result

The constants are from samples of single transforms on an H200.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

SMALL_PRIME = 29  # factors up to it share a pass
LARGEST_PRIME = 127  # factors above it are transformed by convolutions
PASS = 1.1  # traffic of a pass, as if it were so much more
SMOOTH = 1.3  # passes of a length that is no power of two
ACROSS = 1.3  # more of a pass along another dimension than the last
PRIME, PRIME_SLOPE = 1.5, 0.038  # passes of a large prime: a part of them for each of its numbers
CONVOLVED = 3.0  # passes of a length that is transformed by convolutions
HALF = 2.5  # passes over real numbers of an even length that is no power of two
SCALED = {"IFFT": 1.15, "IRFFT": 1.7}  # of the pass that scales


def fft_bytes(
    kind: str, lengths: Sequence[int], operand_bytes: float, result_bytes: float
) -> float:
    """Traffic of a transform along the last dimensions, of these lengths. `kind`: "FFT", "IFFT",
    "RFFT" of real numbers, or "IRFFT" to real numbers."""
    complex_bytes = operand_bytes if kind == "IRFFT" else result_bytes
    last_pass = operand_bytes + result_bytes
    is_real = kind in ("RFFT", "IRFFT")
    total = PASS * last_pass * (_real_passes(lengths[-1]) if is_real else _passes(lengths[-1]))
    total += sum(2 * complex_bytes * PASS * ACROSS * _passes(length) for length in lengths[:-1])
    if kind == "IRFFT":
        total += 2 * operand_bytes
    return total + SCALED.get(kind, 0.0) * 2 * result_bytes


def _real_passes(length: int) -> float:
    if length % 2:
        return 2 + _passes(length)
    if length & (length - 1) == 0:
        return 1.0
    return max(HALF, 1 + _passes(length // 2))


def _passes(length: int) -> float:
    """Of complex numbers along one dimension."""
    primes = list(_primes(length))
    large = [prime for prime in primes if prime > SMALL_PRIME]
    if large and large[-1] > LARGEST_PRIME:
        return CONVOLVED
    others = [prime for prime in primes if prime <= SMALL_PRIME]
    if others and others[-1] > 2:
        passes = SMOOTH
    else:
        passes = 1.0 if others or not large else 0.0
    return passes + sum(PRIME + PRIME_SLOPE * prime for prime in large)


def _primes(number: int) -> Iterator[int]:
    """The prime factors of a number, the smallest first."""
    prime = 2
    while prime * prime <= number:
        while number % prime == 0:
            yield prime
            number //= prime
        prime += 1
    if number > 1:
        yield number

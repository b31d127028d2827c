"""Hand-written layouts of a Wide-ResNet: images split over devices, and channels of its blocks."""

from __future__ import annotations

from jax.sharding import PartitionSpec as P

from .handwritten import ALL, HandWritten, Specs, largest_dim, replicated


def image_data_parallel(num_devices: int) -> HandWritten:
    return HandWritten("data parallel", (num_devices, 1), replicated, P(ALL), {"*": P(ALL)})


def image_fsdp(num_devices: int) -> HandWritten:
    """FSDP of a convolutional network: images split over all devices."""
    parameter = largest_dim(ALL, num_devices)
    return HandWritten("FSDP (ZeRO-3)", (num_devices, 1), parameter, P(ALL), {"*": P(ALL)})


def image_zero2(num_devices: int) -> HandWritten:
    moment = largest_dim(ALL, num_devices)
    return HandWritten("ZeRO-2", (num_devices, 1), replicated, P(ALL), {"*": P(ALL)}, moment=moment)


def image_hsdp(num_hosts: int, per_host: int) -> HandWritten:
    """Filters split inside a host and replicated across hosts, moments split over all devices."""
    return HandWritten(
        f"HSDP {num_hosts}×{per_host}",
        (num_hosts, per_host),
        largest_dim("y", per_host),
        P(ALL),
        {"*": P(ALL)},
        moment=largest_dim(("y", "x"), num_hosts * per_host),
    )


def image_channels(data: int, tensor: int) -> HandWritten:
    """Megatron's columns and rows in the bottleneck blocks of a Wide-ResNet, with ZeRO-3 on "x".

    A block's 3×3 convolution produces channels split over "y", and the last convolution sums over
    them. The first one is split too, and its output, a quarter of the residual stream, gathered."""

    def parameter(path: str, shape: tuple[int, ...]) -> P:
        if len(shape) == 2:
            return P("x", None)
        if len(shape) < 4:
            return P()
        if "'Conv_2'" in path:
            return P(None, None, "y", "x")
        if "'stem'" in path:  # three colour channels
            return P()
        return P(None, None, "x", "y")

    whole = P("x", None, None, None)
    split = P("x", None, None, "y")
    activations: dict[str, Specs] = {
        "*": whole, "Conv_0": split, "Conv_1": split, "BatchNorm_1": split, "shortcut": split,
        "head": P("x", None),
    }  # fmt: skip
    name = f"channels {data}×{tensor} + ZeRO-3"
    return HandWritten(name, (data, tensor), parameter, P("x"), activations)

"""Hand-written layouts of GPT, Llama and BERT: data, ZeRO-2, FSDP, HSDP, Megatron, FSDP + TP.

They follow common practice: FSDP gathers the kernels of one layer at a time; the devices of a host
share the tensor axis; with sequence sharding, the residual stream and its norms are split along the
sequence between the tensor parallel parts, as in Megatron-LM.
"""

from __future__ import annotations

from jax.sharding import PartitionSpec as P

from .handwritten import ALL, HandWritten, Rule, Specs, largest_dim, replicated

COLUMN = ("'qkv'", "'query'", "'key'", "'value'", "'up'", "'gate'", "'lm_head'")
ROW = ("'out'", "'down'")


def data_parallel(num_devices: int) -> HandWritten:
    tokens = P(ALL, None, None)
    return HandWritten("data parallel", (num_devices, 1), replicated, P(ALL), {"*": tokens})


def fsdp(num_devices: int) -> HandWritten:
    tokens, by_token = P(ALL, None, None), P(None, ALL)
    return HandWritten(
        "FSDP (ZeRO-3)",
        (num_devices, 1),
        largest_dim(ALL, num_devices),
        P(ALL),
        {"*": tokens},
        expert_einsums(by_token, by_token, by_token, tokens),
    )


def zero2(num_devices: int) -> HandWritten:
    """Parameters replicated, moments (and therefore gradients) split."""
    base = fsdp(num_devices)
    return HandWritten(
        "ZeRO-2", base.mesh_shape, replicated, base.batch, base.activations, moment=base.parameter
    )


def hsdp(num_hosts: int, per_host: int) -> HandWritten:
    """Parameters split inside a host and replicated across hosts, moments split over all devices.
    "y" is the major axis of moments, so a host has all moments of the parameters it keeps."""
    base = fsdp(num_hosts * per_host)
    return HandWritten(
        f"HSDP {num_hosts}×{per_host}",
        (num_hosts, per_host),
        largest_dim("y", per_host),
        base.batch,
        base.activations,
        base.einsums,
        moment=largest_dim(("y", "x"), num_hosts * per_host),
    )


def expert_einsums(by_token: P, by_expert: P, inside: P, tokens: P) -> dict[str, Specs]:
    """For a mixture: slots are filled and emptied on the tokens' devices and go to the experts in
    between. With only the latter annotated, XLA gathers all tokens everywhere."""
    return {
        "gsec,gsm->egcm": [by_token, by_expert],
        "egcm,emh->egch": inside,
        "egch,ehm->egcm": [by_expert, by_token],
        "gsec,egcm->gsm": tokens,
    }


def megatron(
    data: int,
    tensor: int,
    *,
    sequence: bool,
    zero: bool = False,
    split_moments: bool = False,
    vocab_size: int = 0,
) -> HandWritten:
    """Column- and row-split kernels on "y", batch on "x". With `sequence` the residual stream is
    split along the sequence between them; with `zero` kernels are also split over "x", with
    `split_moments` only their optimizer moments. Experts, if any, are split over "x" and inside
    over "y", with tokens exchanged by all-to-all. A vocabulary that "y" does not divide is not
    split; the head is then split along the sequence."""
    whole = P("x", None, None)
    split = P("x", None, "y")
    by_sequence = P("x", "y", None)
    stream = by_sequence if sequence else whole
    logits = by_sequence if vocab_size % tensor else split
    # Computed in shards and gathered at the output: the inside of a norm is float32.
    norm = [stream, whole] if sequence else whole
    activations: dict[str, Specs] = {
        "*": stream, "logits": logits, "lm_head": logits, "out": stream, "down": stream,
        "qkv": split, "query": split, "key": split, "value": split, "up": split, "gate": split,
        "attention_norm": norm, "ffn_norm": norm, "final_norm": norm,
        "dense_attention_norm": norm, "expert_attention_norm": norm, "experts_norm": norm,
        "router": whole,
    }  # fmt: skip
    einsums: dict[str, Specs] = {
        # Without this, XLA splits parts of attention along the sequence instead of by heads.
        "bqnd,bknd->bnqk": P("x", "y", None, None),
        "bnqk,bknd->bqnd": P("x", None, "y", None),
        "bqngd,bknd->bngqk": P("x", "y", None, None, None),
        "bngqk,bknd->bqngd": P("x", None, "y", None, None),
        **expert_einsums(P(None, "x"), P("x", None, None, None), P("x", None, None, "y"), whole),
    }
    name = f"Megatron {data}×{tensor}" + (" + sequence" if sequence else "")
    name += " + ZeRO-3" if zero else " + split moments" if split_moments else ""
    return HandWritten(
        name,
        (data, tensor),
        _columns_and_rows(tensor, "x" if zero and data > 1 else None, vocab_size),
        P("x"),
        activations,
        einsums,
        moment=_split_moments(data, tensor, vocab_size) if split_moments else None,
    )


def _split_moments(data: int, tensor: int, vocab_size: int) -> Rule:
    """Moments of kernels are also split over "x". Those of the embedding are split only along the
    vocabulary, like its gradient; otherwise XLA would gather everything the gradient is made of."""
    kernels = _columns_and_rows(tensor, "x", vocab_size)

    def moment(path: str, shape: tuple[int, ...]) -> P:
        if "embedding" in path and len(shape) == 2 and vocab_size % (data * tensor) == 0:
            return P(("y", "x"), None)
        return kernels(path, shape)

    return moment


def _columns_and_rows(tensor: int, other: str | None, vocab_size: int) -> Rule:
    """Kernels split on "y" as in Megatron, and along their other dimension over `other`."""
    vocab = None if vocab_size % tensor else "y"

    def parameter(path: str, shape: tuple[int, ...]) -> P:
        column = any(name in path for name in COLUMN)
        if len(shape) == 1:
            return P("y") if column and shape[0] % tensor == 0 else P()
        if "'experts'" in path and len(shape) == 3:
            return P("x", None, "y") if column else P("x", "y", None)
        if "embedding" in path:
            return P(vocab, other)
        if "'lm_head'" in path:
            return P(other, vocab)
        if column:
            return P(other, "y")
        if any(name in path for name in ROW):
            return P("y", other)
        return P()

    return parameter

"""`python -m examples.llm_serving --model FOLDER`: a folder of weights → a server on a port."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from autopar.errors import ArgumentError, AutoparError

KEY_VARIABLE = "LLM_SERVING_API_KEY"  # not an option: others could read the command line


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        return _serve(args)
    except AutoparError as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        print(f"error: cannot listen on {args.host}:{args.port}: {error}", file=sys.stderr)
    return 2


def _serve(args: argparse.Namespace) -> int:
    try:
        from examples.llm_serving.running import serve
        from examples.llm_serving.server import Limits, Server
    except ImportError as error:
        raise ArgumentError(
            f"The server needs the package `{error.name}`. Install it with "
            "`pip install 'autopar[serving]'`."
        ) from error
    from examples.llm_serving.model import load
    from examples.llm_serving.tokens import Tokenizer

    limits = Limits(
        max_body_bytes=args.max_body_bytes,
        max_choices=args.max_choices,
        max_connections=args.max_connections,
        request_s=args.request_timeout,
        drain_s=args.drain,
        stuck_s=args.stuck,
    )
    tokenizer = Tokenizer.load(args.model)
    with load(
        args.model,
        dtype=args.dtype,
        method=_method(args),
        num_slots=args.slots,
        max_length=args.max_length,
        queue_size=args.queue,
        steps_per_call=args.steps_per_call,
        attended_lengths=args.attended_lengths,
        warm_up_lengths=args.warm_up,
        warm_up_sampling=True,
    ) as model:
        if args.name:
            model.engine.model_name = args.name
        server = Server(
            model.engine,
            tokenizer,
            eos_token_ids=model.config.eos_token_ids,
            limits=limits,
            api_key=os.environ.get(KEY_VARIABLE) or None,
        )
        closed = serve(server, args.host, args.port, lambda port: _announce(args, model, port))
    return 0 if closed else 1


def _announce(args: argparse.Namespace, model: Any, port: int) -> None:
    print(f"serving {model.engine.model_name} at http://{args.host}:{port}", flush=True)


def _method(args: argparse.Namespace) -> Any:
    import autopar

    shape = _mesh_shape(args.mesh)
    if args.stages == 1:
        return autopar.ShardParallel(mesh_shape=shape)
    if shape != "auto":
        raise ArgumentError("--mesh is the shape of one mesh; leave it out with --stages.")
    return autopar.PipeshardParallel(
        1, stages=autopar.UniformStages(args.stages), schedule="inference"
    )


def _mesh_shape(text: str) -> Any:
    if text == "auto":
        return "auto"
    try:
        shape = tuple(int(size) for size in text.split("x"))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise ArgumentError(f"--mesh {text!r}: expected `auto`, or sizes such as 8 or 2x4.")
    return shape


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"needs a number of at least 1, got {text}")
    return value


def _lengths(text: str) -> tuple[int, ...] | None:
    if text == "all":
        return None
    return tuple(_positive(part) for part in text.split(",") if part)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.llm_serving",
        description="Serves a decoder model from a local folder over HTTP, OpenAI-style. "
        f"Clients need the API key in the variable {KEY_VARIABLE}, if it is set.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, metavar="FOLDER", help="config.json, *.safetensors, tokenizer")
    add("--name", help="what clients call the model; default: the folder's name")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--mesh", default="auto", help="shape of the mesh, such as 8 or 2x4")
    add("--stages", type=_positive, default=1, help="pipeline stages, one after another")
    add("--dtype", help="type of weights and cache, such as bfloat16; default: the folder's")
    add("--slots", type=_positive, default=8, help="requests decoded together")
    add("--max-length", type=_positive, help="tokens of prompt and answer; default: the model's")
    add("--queue", type=_positive, default=64, help="requests that may wait")
    add("--steps-per-call", type=_positive, default=1, help="decode steps per call")
    add("--max-body-bytes", type=_positive, default=1 << 20)
    add("--max-choices", type=_positive, default=16, help="answers of one request")
    add("--max-connections", type=_positive, default=512)
    add("--request-timeout", type=float, default=600.0, help="seconds, waiting included")
    add("--stuck", type=float, default=120.0, help="seconds per step until /live says 503")
    add("--drain", type=float, default=10.0, help="seconds for running requests at shutdown")
    add(
        "--attended-lengths",
        type=_lengths,
        default=(),
        metavar="N,…",
        help="decode reads the cache up to the first sufficient of these lengths",
    )
    add(
        "--warm-up",
        type=_lengths,
        default="all",
        metavar="N,…",
        help="compile for prompts of these lengths before the first request; '' for none",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""The shape of a decoder model: from a Hugging Face `config.json` to a `ModelConfig`.

One `ModelConfig` describes all architectures, so one decoder (`decoder.py`) runs them all. A new
architecture needs a reader here and a table of names in `names.py`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError


class ModelError(AutoparError):
    """The folder does not contain a model that can be served."""


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How Llama 3 stretches rotary positions: wavelengths above `original_positions` /
    `low_freq_factor` are divided by `factor`, those below `original_positions` /
    `high_freq_factor` are kept, and those between change smoothly. With `original_positions` = 0
    all are divided (linear scaling)."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 0


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder.

    Attributes:
      max_positions: the number of positions the model was trained for.
      embedding_size: of token embeddings; projected to `hidden_size` if it differs.
      norm: "layer" (mean and variance, with a bias) or "rms".
      norm_first: whether a layer normalises its input; otherwise its output.
      final_norm: whether the output of the last layer is normalised.
      learned_positions: an embedding per position; otherwise positions rotate queries and keys.
      position_offset: rows of that embedding before the first position.
      gated: whether the feed-forward multiplies two projections.
      tied_head: whether logits are products with the token embeddings.
      dtype: type of the weights in the folder.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    feed_forward_size: int
    max_positions: int
    embedding_size: int
    activation: str
    norm: str = "layer"
    norm_eps: float = 1e-5
    norm_first: bool = True
    final_norm: bool = True
    learned_positions: bool = True
    position_offset: int = 0
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    gated: bool = False
    attention_bias: bool = True
    feed_forward_bias: bool = True
    tied_head: bool = True
    dtype: str = "float32"
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in _SIZES:
            given = getattr(self, name)
            if not isinstance(given, int) or isinstance(given, bool) or given < 1:
                raise ModelError(f"{self.architecture}: {name}={given!r}: expected an integer ≥ 1.")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.architecture}: {self.num_heads} heads cannot share {self.num_kv_heads} "
                "key-value heads evenly."
            )
        if self.activation not in ACTIVATIONS:
            raise ModelError(
                f"{self.architecture}: unknown activation {self.activation!r}; choose from "
                f"{', '.join(ACTIVATIONS)}."
            )
        if self.dtype not in DTYPES:
            raise ModelError(
                f"{self.architecture}: unknown dtype {self.dtype!r}; choose from "
                f"{', '.join(DTYPES)}."
            )
        if not self.learned_positions and self.head_size % 2:
            raise ModelError(
                f"{self.architecture}: rotary heads need an even size, got {self.head_size}."
            )


_SIZES = (
    "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_size",
    "feed_forward_size", "max_positions", "embedding_size",
)  # fmt: skip
ACTIVATIONS = ("relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "silu", "swish")
DTYPES = ("float32", "bfloat16", "float16")


def read_config(folder: str | Path) -> ModelConfig:
    """The model in a folder, by its `config.json` (and `generation_config.json`, if any, for the
    tokens that end an answer)."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelError(f"{folder}: not a folder. Give the local folder of a Hugging Face model.")
    values = _read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    if generation.exists():
        values |= {
            key: value
            for key, value in _read_json(generation).items()
            if key in ("eos_token_id", "pad_token_id") and value is not None
        }
    return config_from_dict(values, str(folder / "config.json"))


def config_from_dict(values: Mapping[str, Any], where: str = "config") -> ModelConfig:
    """The same from the contents of a `config.json`; `where` is for messages."""
    kind = values.get("model_type")
    reader = ARCHITECTURES.get(kind) if isinstance(kind, str) else None
    if reader is None:
        raise ModelError(
            f"{where}: model_type {kind!r} is not supported. Supported are "
            f"{', '.join(ARCHITECTURES)}."
        )
    try:
        config = reader(values)
    except KeyError as error:
        raise ModelError(f"{where}: {error.args[0]!r} is missing, which {kind} needs.") from error
    except (TypeError, ValueError) as error:
        raise ModelError(f"{where}: a value has the wrong type: {error}.") from error
    except ModelError as error:
        raise ModelError(f"{where}: {error}") from error
    return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(
            f"{path}: is missing. A model's folder has it next to its *.safetensors files."
        ) from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}.") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(values).__name__}.")
    return values


def _common(values: Mapping[str, Any]) -> dict[str, Any]:
    eos = values.get("eos_token_id")
    ids = () if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)
    dtype = values.get("dtype") or values.get("torch_dtype") or "float32"
    return {
        "architecture": values["model_type"],
        "vocab_size": values["vocab_size"],
        "dtype": str(dtype).removeprefix("torch."),
        "eos_token_ids": tuple(int(i) for i in ids),
        "pad_token_id": values.get("pad_token_id"),
    }


def _refuse_unless(values: Mapping[str, Any], key: str, wanted: Any) -> None:
    given = values.get(key, wanted)
    if given is not None and given != wanted:
        raise ModelError(f"{key}={given!r} is not supported, only {wanted!r}.")


def _gpt2(values: Mapping[str, Any]) -> ModelConfig:
    _refuse_unless(values, "scale_attn_by_inverse_layer_idx", False)
    _refuse_unless(values, "scale_attn_weights", True)
    _refuse_unless(values, "add_cross_attention", False)
    hidden, heads = values["n_embd"], values["n_head"]
    return ModelConfig(
        **_common(values),
        hidden_size=hidden,
        num_layers=values["n_layer"],
        num_heads=heads,
        num_kv_heads=heads,
        head_size=_share(hidden, heads),
        feed_forward_size=values.get("n_inner") or 4 * hidden,
        max_positions=values["n_positions"],
        embedding_size=hidden,
        activation=values.get("activation_function", "gelu_new"),
        norm_eps=float(values.get("layer_norm_epsilon", 1e-5)),
        tied_head=bool(values.get("tie_word_embeddings", True)),
    )


def _opt(values: Mapping[str, Any]) -> ModelConfig:
    _refuse_unless(values, "layer_norm_elementwise_affine", True)
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    first = bool(values.get("do_layer_norm_before", True))
    return ModelConfig(
        **_common(values),
        hidden_size=hidden,
        num_layers=values["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=heads,
        head_size=_share(hidden, heads),
        feed_forward_size=values["ffn_dim"],
        max_positions=values["max_position_embeddings"],
        embedding_size=values.get("word_embed_proj_dim") or hidden,
        activation=values.get("activation_function", "relu"),
        norm_first=first,
        final_norm=first and not values.get("_remove_final_layer_norm", False),
        position_offset=2,
        attention_bias=bool(values.get("enable_bias", True)),
        feed_forward_bias=bool(values.get("enable_bias", True)),
        tied_head=bool(values.get("tie_word_embeddings", True)),
    )


def _llama(values: Mapping[str, Any]) -> ModelConfig:
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    theta = rope.get("rope_theta", values.get("rope_theta", 10000.0))
    bias = bool(values.get("attention_bias", False))
    return ModelConfig(
        **_common(values),
        hidden_size=hidden,
        num_layers=values["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=values.get("num_key_value_heads") or heads,
        head_size=values.get("head_dim") or _share(hidden, heads),
        feed_forward_size=values["intermediate_size"],
        max_positions=values["max_position_embeddings"],
        embedding_size=hidden,
        activation=values.get("hidden_act", "silu"),
        norm="rms",
        norm_eps=float(values.get("rms_norm_eps", 1e-6)),
        learned_positions=False,
        rope_theta=float(theta),
        rope_scaling=_rope_scaling(rope, values),
        gated=True,
        attention_bias=bias,
        feed_forward_bias=bool(values.get("mlp_bias", False)),
        tied_head=bool(values.get("tie_word_embeddings", False)),
    )


def _rope_scaling(rope: Mapping[str, Any], values: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(float(rope["factor"]))
    if kind == "llama3":
        positions = rope.get("original_max_position_embeddings")
        return RopeScaling(
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            int(positions or values["max_position_embeddings"]),
        )
    raise ModelError(f"rope_type {kind!r} is not supported; use default, linear or llama3.")


def _share(hidden: int, heads: int) -> int:
    if hidden % heads:
        raise ModelError(f"hidden size {hidden} is not a multiple of {heads} heads.")
    return hidden // heads


ARCHITECTURES: dict[str, Callable[[Mapping[str, Any]], ModelConfig]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "opt": _opt,
}

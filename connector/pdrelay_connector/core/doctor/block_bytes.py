"""How many bytes one descriptor of a model's KV has: one layer's part of one block on one rank."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from pdrelay_connector.core.layout.source_ranks import heads_of
from pdrelay_connector.errors import SettingsError

BYTES_OF: Mapping[str, int] = {
    "float32": 4, "float16": 2, "bfloat16": 2, "half": 2, "float": 4,
    "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1,
}  # fmt: skip
MOST: Final = 1 << 16  # layers, KV heads, or values of a head: no model has as many


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's shape; ``content``: the values of one token and one head in a layer."""

    layers: int
    kv_heads: int
    content: int
    dtype: str

    def block_bytes(self, *, block_size: int, ranks: int) -> int:
        """Return the bytes of a block's run: vLLM keeps K and V of a block together (its layout
        LBHNC).

        ``block_size``: tokens. ``ranks``: tensor-parallel size.
        """
        first, last = heads_of(self.kv_heads, ranks, 0)
        return (last - first) * block_size * self.content * BYTES_OF[self.dtype]


def read_shape(config: Mapping[str, Any], *, cache_dtype: str = "auto") -> ModelShape:
    """Read the shape from a ``config.json`` (with the names of transformers).

    Raises :exc:`~pdrelay_connector.errors.SettingsError`.
    """
    text = config.get("text_config")
    model: Mapping[str, Any] = (
        cast("Mapping[str, Any]", text) if isinstance(text, Mapping) else config
    )
    dtype = str(
        model.get("dtype") or model.get("torch_dtype") or config.get("torch_dtype") or "bfloat16"
    )
    dtype = dtype if cache_dtype == "auto" else cache_dtype
    if dtype not in BYTES_OF:
        raise SettingsError(
            f"the KV cache's type is {dtype!r}; known are {', '.join(sorted(BYTES_OF))}"
        )
    try:
        layers = int(model["num_hidden_layers"])
        heads = int(model["num_attention_heads"])
        if (latent := model.get("kv_lora_rank")) is not None:  # MLA: one latent for all heads
            kv_heads = 1
            content = int(latent) + int(model.get("qk_rope_head_dim") or 0)
        else:
            kv_heads = int(model.get("num_key_value_heads") or heads)
            content = 2 * int(model.get("head_dim") or int(model["hidden_size"]) // heads)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError) as exc:
        raise SettingsError(
            f"the model's config.json does not say its shape ({exc!r}); give --block-bytes"
        ) from exc
    if not all(0 < size <= MOST for size in (layers, kv_heads, content)):
        raise SettingsError(
            f"the model's config.json says {layers} layers of {kv_heads} KV heads of {content} "
            f"values, and each must be between 1 and {MOST}; give --block-bytes"
        )
    return ModelShape(layers, kv_heads, content, dtype)

"""The bytes of a descriptor, from what a model says of itself."""

import pytest

from pdrelay_connector.core.doctor.block_bytes import read_shape
from pdrelay_connector.errors import SettingsError

LLAMA = {
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}  # fmt: skip
LATENT = {"num_hidden_layers": 61, "num_attention_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}


@pytest.mark.parametrize(
    ("config", "options", "ranks", "size"),
    [
        (LLAMA, {}, 1, 2 * 8 * 128 * 16 * 2),
        (LLAMA, {}, 8, 2 * 1 * 128 * 16 * 2),
        (LLAMA, {}, 16, 2 * 1 * 128 * 16 * 2),
        (LLAMA, {"cache_dtype": "fp8"}, 1, 2 * 8 * 128 * 16),
        ({"text_config": LLAMA, "torch_dtype": "float32"}, {}, 1, 2 * 8 * 128 * 16 * 2),
        (LATENT, {}, 8, 576 * 16 * 2),
    ],
)
def test_one_layers_part_of_a_block(config, options, ranks, size):
    """K and V of a rank's heads; a latent is the same on all ranks."""
    assert read_shape(config, **options).block_bytes(block_size=16, ranks=ranks) == size


@pytest.mark.parametrize(
    "config",
    [
        {},
        {**LLAMA, "torch_dtype": "int3"},
        {**LLAMA, "num_attention_heads": 0},
        {**LLAMA, "num_attention_heads": 0, "head_dim": 8},
        {**LLAMA, "num_hidden_layers": float("inf")},
        {**LLAMA, "num_attention_heads": 10**40},
        {**LATENT, "kv_lora_rank": -576},
    ],
)
def test_a_model_that_does_not_say_is_refused(config):
    with pytest.raises(SettingsError):
        read_shape({**config, "num_key_value_heads": None})

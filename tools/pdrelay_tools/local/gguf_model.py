"""Converts a Llama in a GGUF file into safetensors, config and tokenizer, which engines load.

``python -m pdrelay_tools.local.gguf_model FILE FOLDER`` does it in a process of its own, which
takes some 20 s and half a GB. The last line of its error output says what failed.
"""

import re
import sys
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pdrelay_tools.local.bf16_file import Bf16Tensor, write_bf16_file
from pdrelay_tools.local.errors import LocalError
from pdrelay_tools.local.made_folder import write_json

MOST_WEIGHTS: Final = 500_000_000  # 1 GB in bf16: this is for small models
CONTROL: Final = 3  # the type of a token that is no text (LLAMA_TOKEN_TYPE_CONTROL of llama.cpp)
NAMES: Final = {  # of a Llama's tensors in GGUF, and in the files of Hugging Face
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(file: Path, folder: Path) -> None:
    """Write the files of the model into an existing folder. Raises LocalError: no such model."""
    try:
        reader = GGUFReader(file)
    except (OSError, ValueError, IndexError) as exc:
        raise LocalError(f"{file} is no GGUF file: {exc}") from exc
    try:
        config = _config(reader)
        tokenizer = _tokenizer(reader)
        tokenizer_config = _tokenizer_config(reader)
    except KeyError as exc:
        raise LocalError(f"{file} has no field {exc.args[0]}") from exc
    tensors = _tensors(reader, config)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", tokenizer_config)
    write_json(folder / "config.json", config)
    ends = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / "generation_config.json", ends)
    write_bf16_file(folder / "model.safetensors", tensors)


def _field(reader: GGUFReader, name: str) -> Any:  # noqa: ANN401 (a number, a text, or a list of them)
    return reader.fields[name].contents()


def _config(reader: GGUFReader) -> dict[str, Any]:
    if (kind := _field(reader, "general.architecture")) != "llama":
        raise LocalError(
            f"the model in the GGUF file is a {kind}, and only a llama can be converted"
        )
    theta: float = _field(reader, "llama.rope.freq_base")
    head_dim: int = _field(reader, "llama.rope.dimension_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": len(reader.fields["tokenizer.ggml.tokens"].data),
        "hidden_size": _field(reader, "llama.embedding_length"),
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_attention_heads": _field(reader, "llama.attention.head_count"),
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "head_dim": head_dim,
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "hidden_act": "silu",
        "rms_norm_eps": _field(reader, "llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "rope_theta": theta,  # where transformers before 5 has it
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
    }


def _tokenizer(reader: GGUFReader) -> Tokenizer:
    if (kind := _field(reader, "tokenizer.ggml.pre")) != "smollm":
        raise LocalError(
            f"the tokenizer in the GGUF file splits text as {kind}, and only smollm can be "
            f"converted"
        )
    words: list[str] = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, merges))
    # What llama.cpp calls smollm: a digit is a token of its own, and the rest is split as GPT-2
    # does.
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(words, _field(reader, "tokenizer.ggml.token_type"), strict=True)
    tokenizer.add_special_tokens(
        [AddedToken(word, normalized=False) for word, kind in kinds if kind == CONTROL]
    )
    return tokenizer


def _tokenizer_config(reader: GGUFReader) -> dict[str, object]:
    words: list[str] = _field(reader, "tokenizer.ggml.tokens")
    special = {
        "bos_token": "bos",
        "eos_token": "eos",
        "pad_token": "padding",
        "unk_token": "unknown",
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{
            name: words[_field(reader, f"tokenizer.ggml.{kind}_token_id")]
            for name, kind in special.items()
        },
        "model_max_length": _field(reader, "llama.context_length"),
        "clean_up_tokenization_spaces": False,
        "chat_template": _field(reader, "tokenizer.chat_template"),
    }


def _tensors(reader: GGUFReader, config: dict[str, Any]) -> list[Bf16Tensor]:
    weights = sum(int(tensor.n_elements) for tensor in reader.tensors)
    if weights > MOST_WEIGHTS:
        raise LocalError(
            f"the model in the GGUF file has {weights:,} weights, and {MOST_WEIGHTS:,} are the most"
        )
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    return [_tensor(tensor, heads) for tensor in reader.tensors]


def _tensor(tensor: ReaderTensor, heads: dict[str, int]) -> Bf16Tensor:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", tensor.name)
    if match is None or match[2] not in NAMES:
        raise LocalError(f"the GGUF file has a tensor {tensor.name}, which a llama has not")
    layer, kind = match.groups()
    ours = NAMES[kind]
    name = f"{ours}.weight" if layer is None else f"model.layers.{layer}.{ours}.weight"
    shape = [int(size) for size in reversed(tensor.shape)]  # GGUF has the innermost first
    return Bf16Tensor(name, shape, partial(_values, tensor, heads.get(kind)))


def _values(tensor: ReaderTensor, heads: int | None) -> NDArray[np.float32]:
    values: NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type)
    if heads is None:
        return values
    # llama.cpp rotates neighbours and Hugging Face halves, so that llama.cpp has the rows of q and
    # k in another order.
    rows, columns = values.shape
    return (
        values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    )


def main() -> int:
    """Convert what the arguments name; return the exit code."""
    file, folder = map(Path, sys.argv[1:])
    try:
        convert(file, folder)
    except LocalError as exc:
        sys.stderr.write(f"{exc}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

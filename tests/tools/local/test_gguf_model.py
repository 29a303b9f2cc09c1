"""A GGUF file becomes the folder that engines load: the same weights, the same tokens."""

import json
import struct

import numpy as np
import pytest
from tokenizers import Tokenizer

from pdrelay_tools.local import gguf_model
from pdrelay_tools.local.errors import LocalError
from pdrelay_tools.local.gguf_model import convert
from support.little_wheel import SPECIAL, TEMPLATE, WORDS, write_little_gguf


@pytest.fixture(scope="module")
def little(tmp_path_factory):
    return write_little_gguf(tmp_path_factory.mktemp("gguf") / "little.gguf")


@pytest.fixture(scope="module")
def converted(little, tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted")
    convert(little.file, folder)
    return folder


def read_json(path):
    return json.loads(path.read_text())


def tensors(folder):
    raw = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    data = raw[8 + length :]
    del header["__metadata__"]
    bits = {name: np.frombuffer(data[slice(*info["data_offsets"])], "<u2") for name, info in header.items()}
    return {name: (bits[name].astype("<u4") << 16).view("<f4").reshape(header[name]["shape"]) for name in header}


def test_every_weight_is_where_transformers_looks_for_it(little, converted):
    """Rows of q and k among them, which llama.cpp keeps in another order: their model would answer in riddles."""
    found = tensors(converted)

    assert found.keys() == little.weights.keys()
    assert [name for name, values in little.weights.items() if not np.array_equal(found[name], values)] == []


def test_the_config_is_that_of_the_file(converted):
    """A head more or another base of the rotation is another model."""
    config = read_json(converted / "config.json")

    assert {name: config[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")} == {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    assert config["rope_parameters"]["rope_theta"] == config["rope_theta"] == 100000.0
    assert config["vocab_size"] == len(WORDS)
    assert config["tie_word_embeddings"]
    assert read_json(converted / "generation_config.json") == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def test_text_becomes_the_tokens_of_the_file(converted):
    """A digit stands alone whatever was merged, and a special token is one token."""
    tokenizer = Tokenizer.from_file(str(converted / "tokenizer.json"))

    assert tokenizer.encode("<|im_start|>he12").tokens == ["<|im_start|>", "he", "1", "2"]
    assert tokenizer.decode(tokenizer.encode("Grüße 你好 12\n").ids) == "Grüße 你好 12\n"
    assert [tokenizer.token_to_id(word) for word in SPECIAL] == [0, 1, 2]


def test_the_chat_template_comes_along(converted):
    """Without one an engine refuses every chat."""
    config = read_json(converted / "tokenizer_config.json")

    assert config["chat_template"] == TEMPLATE
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tokenizer": "llama-bpe"}, "splits text as llama-bpe, and only smollm can be converted"),
        ({"extra_tensor": "rope_freqs.weight"}, r"has a tensor rope_freqs\.weight, which a llama has not"),
        ({"architecture": "qwen2"}, "is a qwen2, and only a llama can be converted"),
    ],
)
def test_what_cannot_be_converted_is_one_sentence(tmp_path, options, says):
    """Half of it would be a model that answers nonsense."""
    little = write_little_gguf(tmp_path / "other.gguf", **options)

    with pytest.raises(LocalError, match=says):
        convert(little.file, tmp_path)


def test_a_file_of_another_kind_is_one_sentence(tmp_path):
    """A page of an index that wants a password is one."""
    (tmp_path / "page.gguf").write_text("<html>please log in</html>")

    with pytest.raises(LocalError, match=r"page\.gguf is no GGUF file"):
        convert(tmp_path / "page.gguf", tmp_path)


def test_a_model_that_is_too_large_is_refused_before_anything_is_written(little, tmp_path, monkeypatch):
    """The sizes in a file are its own claim."""
    monkeypatch.setattr(gguf_model, "MOST_WEIGHTS", 1000)

    with pytest.raises(LocalError, match=r"weights, and 1,000 are the most"):
        convert(little.file, tmp_path)
    assert list(tmp_path.iterdir()) == []

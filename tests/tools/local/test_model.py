"""The tiny model: the same bytes everywhere, never half written, and a vocabulary that survives any text."""

import hashlib
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from pdrelay_tools.local.errors import LocalError
from pdrelay_tools.local.made_folder import FINGERPRINT
from pdrelay_tools.local.model import (
    HEADS,
    HIDDEN,
    VERSION,
    VOCABULARY,
    TinyModel,
    ensure_model,
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "tiny"
    assert ensure_model(directory)
    return directory


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def tensors(directory):
    raw = (directory / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    data = raw[8 + length :]
    del header["__metadata__"]
    return {name: (info["shape"], data[slice(*info["data_offsets"])]) for name, info in header.items()}


def test_the_same_parameters_give_the_same_bytes(tiny, tmp_path):
    """Two engines that each made their own copy must agree on every block."""
    ensure_model(tmp_path / "again")

    assert contents(tiny) == contents(tmp_path / "again")


def test_a_change_of_the_files_is_a_new_version(tiny):
    """A model that was made earlier is replaced only when VERSION says so: raise it together with this digest."""
    digest = hashlib.sha256(contents(tiny)["model.safetensors"]).hexdigest()

    assert (VERSION, digest[:16]) == (1, "63d24eb8d03d0c29")


def test_another_seed_is_another_model_with_the_same_tokenizer(tiny, tmp_path):
    """Tests serve two models that take the same prompts."""
    ensure_model(tmp_path / "other", TinyModel(seed=1))

    assert contents(tiny)["model.safetensors"] != contents(tmp_path / "other")["model.safetensors"]
    assert contents(tiny)["tokenizer.json"] == contents(tmp_path / "other")["tokenizer.json"]


def test_layers_can_be_chosen(tmp_path):
    """A connector must cope with any number of them."""
    ensure_model(tmp_path, TinyModel(layers=2))

    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == 2
    assert sum(name.endswith("q_proj.weight") for name in tensors(tmp_path)) == 2


def test_a_complete_model_is_left_alone(tiny):
    """Starting engines again takes no time and does not pull files from under those that run."""
    before = (tiny / "model.safetensors").stat().st_mtime_ns

    assert not ensure_model(tiny)
    assert (tiny / "model.safetensors").stat().st_mtime_ns == before


def test_an_older_model_is_replaced(tmp_path):
    """A new release with other weights must not be served with the old ones."""
    ensure_model(tmp_path / "tiny", TinyModel(seed=7))

    assert ensure_model(tmp_path / "tiny")
    assert not ensure_model(tmp_path / "tiny")


def test_a_broken_fingerprint_is_an_incomplete_model(tmp_path):
    """A full disk leaves such files."""
    (tmp_path / FINGERPRINT).write_text('{"versi')

    assert ensure_model(tmp_path)


def test_a_directory_with_other_files_is_refused(tmp_path):
    """`--model ~` must not cost anybody their home directory."""
    (tmp_path / "thesis.tex").write_text("years of work")

    with pytest.raises(LocalError, match="choose another directory"):
        ensure_model(tmp_path)
    assert (tmp_path / "thesis.tex").exists()


def test_whoever_comes_second_keeps_the_first_ones_files(tmp_path, monkeypatch):
    """Two test sessions may start at the same time."""
    real_rename = Path.rename

    def rename_too_late(self, target):
        monkeypatch.setattr(Path, "rename", real_rename)
        ensure_model(target)
        return real_rename(self, target)

    monkeypatch.setattr(Path, "rename", rename_too_late)

    assert ensure_model(tmp_path / "tiny")
    assert not ensure_model(tmp_path / "tiny")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_weights_are_bf16_and_about_5_mb(tiny):
    """Small enough to be made on the fly, and of the type that engines serve."""
    found = tensors(tiny)

    assert found["model.embed_tokens.weight"][0] == [VOCABULARY, HIDDEN]
    assert all(len(data) == 2 * int(np.prod(shape)) for shape, data in found.values())
    assert 4_000_000 < (tiny / "model.safetensors").stat().st_size < 6_000_000
    assert HIDDEN % HEADS == 0


def test_rounding_to_bf16_is_to_the_nearest(tiny):
    """Truncation would bias every weight towards zero."""
    _, data = tensors(tiny)["model.layers.0.input_layernorm.weight"]

    assert np.frombuffer(data, "<u2").tolist() == [0x3F80] * HIDDEN


@pytest.mark.parametrize("text", ["What is the capital?", "Grüße 你好 🙂", "\x00\x07\r\n\t", "<|end|>", ""])
def test_any_text_survives_the_tokenizer(tiny, text):
    """Byte level: there is no unknown token, so that a prompt of any client is served."""
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))

    ids = tokenizer.encode(text).ids

    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert all(token < VOCABULARY for token in ids)


def test_only_readable_tokens_have_an_output_row(tiny):
    """Greedy answers are printable, and never end before max_tokens: the end token cannot win."""
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    shape, data = tensors(tiny)["lm_head.weight"]
    sayable = np.frombuffer(data, "<u2").reshape(shape).any(axis=1)

    texts = [tokenizer.decode([token]) for token in np.flatnonzero(sayable)]

    assert len(texts) > 300
    assert all(text.isascii() and text.isprintable() for text in texts)
    assert not sayable[:4].any()

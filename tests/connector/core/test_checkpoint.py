"""Which bytes of a checkpoint are read: enough to tell two fine-tunes apart, and never many."""

import json

import pytest

from pdrelay_connector.core.checkpoint import (
    LENGTH_BYTES,
    MOST_SLICES,
    SLICE,
    Tensor,
    choose_slices,
    digest_config,
    header_length,
    read_header,
    spread_slices,
)
from pdrelay_connector.errors import UnreadableCheckpoint

GIB = 1 << 30


def tensor(name, length, start=0, file=0):
    return Tensor(name, "BF16", (length // 2,), file, start, length)


def names(slices):
    return {each.key.split("@")[0] for each in slices}


def test_every_tensor_of_a_dense_model_is_read_in_several_places():
    """A fine-tune may have left most of them as they were."""
    tensors = [tensor(f"model.layers.{layer}.{part}", GIB) for layer in range(80) for part in ("q", "k", "v", "mlp")]
    slices = choose_slices(tensors)

    assert names(slices) == {each.name for each in tensors}
    assert len(slices) == 8 * len(tensors) <= MOST_SLICES
    assert all(each.start >= 0 and each.start + each.length <= GIB for each in slices)


def test_experts_do_not_crowd_out_the_attention():
    """A mixture of experts has a hundred thousand tensors, and those that are fine-tuned are seldom the experts."""
    experts = [tensor(f"layers.{n % 60}.experts.{n}.down", GIB) for n in range(90_000)]
    attention = [tensor(f"layers.{layer}.attention.{part}", GIB) for layer in range(60) for part in "qkvo"]
    slices = choose_slices([*experts, *attention])

    assert {each.name for each in attention} <= names(slices)
    assert MOST_SLICES // 2 < len(slices) <= MOST_SLICES
    assert sum(each.length for each in slices) <= MOST_SLICES * SLICE


def test_the_places_are_the_same_however_the_tensors_are_filed():
    """A copy of a checkpoint may be divided into other files."""
    tensors = [tensor(f"t.{number}", 10 * SLICE, start=number * 10 * SLICE) for number in range(9)]
    refiled = [each._replace(file=number % 3, start=7) for number, each in enumerate(reversed(tensors))]

    assert [each.key for each in choose_slices(tensors)] == [each.key for each in choose_slices(refiled)]


def test_small_tensors_are_read_whole():
    """Norms and scales, of KV quantization among them."""
    (piece,) = choose_slices([tensor("k_scale", 4, start=100)])

    assert (piece.start, piece.length) == (100, 4)


def test_a_file_of_unknown_tensors_is_read_at_its_ends_and_in_between():
    """Of a pickle or a GGUF file: the end of the first is a directory with checksums."""
    small, large = spread_slices([1000, 100 * GIB])[0], spread_slices([1000, 100 * GIB])[1:]

    assert (small.start, small.length) == (0, 1000)
    assert large[0].start == 0
    assert max(each.start + each.length for each in large) == 100 * GIB
    assert sum(each.length for each in large) < 32 << 20


def test_a_header_says_where_tensors_are():
    header = json.dumps(
        {"__metadata__": {"format": "pt"}, "a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}
    ).encode()

    assert header_length(len(header).to_bytes(8, "little")) == len(header)
    assert read_header(header, file=3) == [Tensor("a", "F32", (2,), 3, LENGTH_BYTES + len(header) + 8, 8)]


@pytest.mark.parametrize("header", [b"{", b"[]", b'{"a": 1}', b'{"a": {"dtype": "F32"}}', b"\xff"], ids=repr)
def test_an_invalid_header_is_an_error_of_ours(header):
    """It says nothing of the model, and the engine goes on without it."""
    with pytest.raises(UnreadableCheckpoint):
        read_header(header, file=0)


@pytest.mark.parametrize("first", [b"", b"\0" * 8, b"\xff" * 8], ids=repr)
def test_a_file_without_a_header_is_an_error_of_ours(first):
    with pytest.raises(UnreadableCheckpoint):
        header_length(first)


def test_a_configuration_is_what_decides_the_kv():
    """Not where it lies, who has written it, or which token ends an answer."""
    config = {"model_type": "llama", "rope_theta": 1e4, "text": {"layers": 2}}
    same = {"_name_or_path": "/mnt/models", "eos_token_id": 7, "torch_dtype": "bfloat16", **config}

    assert digest_config(config) == digest_config(dict(reversed(same.items())))
    assert digest_config(config) != digest_config({**config, "rope_theta": 5e5})
    assert digest_config(config) != digest_config({**config, "text": {"layers": 3}})
    assert digest_config({"most": 10**30}) != digest_config({"most": 10**31})


def test_values_of_strange_types_are_the_same_in_every_process():
    """Their text may have an address."""
    assert digest_config({"a": object()}) == digest_config({"a": object()})
    assert digest_config({"a": {"x", "y"}}) == digest_config({"a": {"y", "x"}})

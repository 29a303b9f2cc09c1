"""Files of checkpoints: equal contents have equal digests wherever they lie, and others have not."""

import json
import os
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from pdrelay_connector.errors import UnreadableCheckpoint
from pdrelay_connector.io.checkpoint_files import (
    WEIGHT_PATTERNS,
    digest_weights,
    digest_whole,
    read_json,
    stamp_of,
    weight_files,
)


def tensors(seed=0, rows=300):
    rnd = np.random.default_rng(seed)
    return {f"layers.{n}.{part}": rnd.normal(size=(rows, 40)).astype(np.float32) for n in range(3) for part in "qk"}


def save(folder, found, *, parts=1):
    folder.mkdir()
    names = sorted(found)
    files = [folder / f"model-{part}.safetensors" for part in range(parts)]
    for part, file in enumerate(files):
        save_file({name: found[name] for name in names[part::parts]}, file)
    return files


def test_a_copy_is_the_same_checkpoint(tmp_path):
    """P may load it from a mount, and D from the hub's cache, where files are links."""
    files = save(tmp_path / "mnt", tensors())
    (tmp_path / "cache").mkdir()
    link = tmp_path / "cache" / files[0].name
    link.symlink_to(files[0])
    copied = shutil.copy(files[0], tmp_path / "weights.safetensors")

    assert digest_weights(files) == digest_weights([link]) == digest_weights([tmp_path / copied])


def test_a_copy_in_other_parts_is_the_same_checkpoint(tmp_path):
    one, two = save(tmp_path / "one", tensors()), save(tmp_path / "two", tensors(), parts=2)

    assert digest_weights(one) == digest_weights(two)


@pytest.mark.parametrize("name", sorted(tensors()))
def test_a_fine_tune_of_one_tensor_is_another_checkpoint(tmp_path, name):
    """Its headers and its files' sizes are those of the model it was made from."""
    base = save(tmp_path / "base", tensors())
    tuned = tensors()
    tuned[name] = tuned[name] * np.float32(1.001)
    other = save(tmp_path / "tuned", tuned)

    assert base[0].stat().st_size == other[0].stat().st_size
    assert digest_weights(base) != digest_weights(other)


def test_another_dtype_is_another_checkpoint(tmp_path):
    """Quantized weights compute other KV."""
    halves = {name: found.astype(np.float16) for name, found in tensors().items()}

    assert digest_weights(save(tmp_path / "a", tensors())) != digest_weights(save(tmp_path / "b", halves))


def test_a_terabyte_is_not_read(tmp_path):
    """It is a hole here, and would take minutes: the checkpoint of a large model must not delay the engine's start."""
    size = 1 << 40
    header = json.dumps({"big": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    files = [tmp_path / "model.safetensors"]
    files[0].write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(files[0], 8 + len(header) + size)

    assert digest_weights(files) == digest_weights(files)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.gguf"])
def test_files_of_unknown_tensors_are_compared_by_their_bytes(tmp_path, name):
    one, other = tmp_path / name, tmp_path / f"other-{name}"
    one.write_bytes(bytes(5 << 20))
    shutil.copy(one, other)
    assert digest_weights([one]) == digest_weights([other])
    with other.open("r+b") as file:
        file.seek((5 << 20) - 1000)
        file.write(b"x")

    assert digest_weights([one]) != digest_weights([other])


def test_a_file_that_is_none_is_an_error_of_ours(tmp_path):
    """The engine has loaded the model some other way."""
    (tmp_path / "model.safetensors").write_bytes(b"?" * 100)
    for files in ([tmp_path / "model.safetensors"], [tmp_path / "absent.safetensors"]):
        with pytest.raises(UnreadableCheckpoint):
            digest_weights(files)
    with pytest.raises(UnreadableCheckpoint):
        digest_whole([tmp_path / "absent"])
    with pytest.raises(UnreadableCheckpoint):
        read_json(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    "entry",
    [
        '{"dtype": "U8", "shape": [8], "data_offsets": [9223372036854775807, 9223372036854775815]}',
        '{"dtype": "U8", "shape": [8], "data_offsets": [18446744073709551615, 0]}',
        '{"dtype": "U8", "shape": [18446744073709551616], "data_offsets": [0, 8]}',
        '{"dtype": "U8", "shape": [-1], "data_offsets": [0, 8]}',
        "[" * 100_000 + "]" * 100_000,
    ],
    ids=["far", "farther", "large", "negative", "deep"],
)
def test_a_header_beyond_all_numbers_is_an_error_of_ours(tmp_path, entry):
    """An adapter's files are read when a request names it: no file may end the engine."""
    header = f'{{"w": {entry}}}'.encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))

    with pytest.raises(UnreadableCheckpoint, match="safetensors header is not valid"):
        digest_weights([file])


@pytest.mark.parametrize("text", ["[" * 100_000, '{"\\ud800": 1}'], ids=["deep", "no text"])
def test_a_configuration_beyond_what_can_be_encoded_is_an_error_of_ours(tmp_path, text):
    """For the same reason."""
    file = tmp_path / "adapter_config.json"
    file.write_text(text)

    with pytest.raises(UnreadableCheckpoint, match=r"adapter_config\.json"):
        read_json(file)


def test_the_files_are_those_that_vllm_loads(tmp_path):
    """A repository has more: consolidated copies, pickles, what training has left, and parts that its index omits."""
    for name in ("a.safetensors", "b.safetensors", "pytorch_model.bin", "training_args.bin"):
        (tmp_path / name).touch()
    assert [file.name for file in weight_files(tmp_path, WEIGHT_PATTERNS)] == ["a.safetensors", "b.safetensors"]
    assert [file.name for file in weight_files(tmp_path, ("*.bin",))] == ["pytorch_model.bin"]
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"t": "b.safetensors"}}')
    assert [file.name for file in weight_files(tmp_path, WEIGHT_PATTERNS)] == ["b.safetensors"]
    (tmp_path / "consolidated.safetensors").touch()

    assert [file.name for file in weight_files(tmp_path, WEIGHT_PATTERNS)] == ["consolidated.safetensors"]
    assert weight_files(tmp_path / "absent", WEIGHT_PATTERNS) == []


def test_a_replaced_file_has_another_stamp(tmp_path):
    """Also one of equal size that was moved over the old one."""
    file, other = tmp_path / "a", tmp_path / "b"
    file.write_text("one")
    before = stamp_of([file, tmp_path / "absent"])
    assert stamp_of([file]) == before
    other.write_text("two")
    other.replace(file)

    assert stamp_of([file]) != before

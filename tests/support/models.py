"""Tiny models of other shapes, made from the tiny Llama: few KV heads, and a sliding window."""

import json

from xpyd_proxy.local.model import KV_HEADS, ensure_model

WINDOW = 96  # tokens that a layer with a sliding window looks back, its own included
# Alternating, so that vLLM makes two KV cache groups of two layers each (of 3 to 1 it makes four groups of one layer).
# Seen with 60 random prompts of 150 to 1200 tokens: any 32 tokens replaced by others changed the 16 greedy tokens. A
# single token missing at the edge of the window moved one of 16 logprobs by 0.0003 to 1.4 in 12 prompts of 12.
LAYER_TYPES = ("sliding_attention", "full_attention") * 2


def windowed_model(directory):
    """Write the tiny model with every other layer looking back 96 tokens only, and return its directory."""
    return _changed(directory, sliding_window=WINDOW, layer_types=LAYER_TYPES)


def one_head_model(directory):
    """Write the tiny model with the first of its KV heads only, which both ranks of two then keep."""
    _changed(directory, num_key_value_heads=1)
    _keep_first_head(directory / "model.safetensors")
    return directory


def _changed(directory, **values):
    ensure_model(directory)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return directory


def _keep_first_head(path):
    """Cut the key and value projections: their rows are the KV heads, one after the other."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    kept, chunks, offset = {"__metadata__": header.pop("__metadata__")}, [], 0
    for name, tensor in header.items():
        start, stop = tensor["data_offsets"]
        rows, columns = tensor["shape"] if len(tensor["shape"]) == 2 else (tensor["shape"][0], None)
        if ".k_proj." in name or ".v_proj." in name:
            rows, stop = rows // KV_HEADS, start + (stop - start) // KV_HEADS
        chunks.append(body[start:stop])
        shape = [rows] if columns is None else [rows, columns]
        kept[name] = tensor | {"shape": shape, "data_offsets": [offset, offset + stop - start]}
        offset += stop - start
    encoded = json.dumps(kept).encode()
    encoded += b" " * (-len(encoded) % 8)
    path.write_bytes(b"".join([len(encoded).to_bytes(8, "little"), encoded, *chunks]))

"""The tiny Llama with a single KV head."""

import json

from pdrelay_tools.local.model import KV_HEADS, ensure_model


def one_head_model(directory):
    """Write the tiny model with the first of its KV heads only, which both ranks of two then keep."""
    ensure_model(directory)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_key_value_heads": 1}))
    _keep_first_head(directory / "model.safetensors")
    return directory


def _keep_first_head(path):
    """Cut the key and value projections: their rows are the KV heads, one after the other."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    body = data[8 + length :]
    kept = {"__metadata__": header.pop("__metadata__")}
    chunks = []
    offset = 0
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

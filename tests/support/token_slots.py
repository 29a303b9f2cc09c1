"""Where vLLM puts a token if several ranks divide a context among them: its own rule, line by line.

As ``ComputeSlotMappingKernel`` in ``vllm/v1/worker/block_table.py``, which ``tests/contract/test_context_shards.py``
runs beside it.
"""


def slot_of(token, size, ranks, rank, interleave):
    """Return (number of the block in the table, place in the block), or None if another rank has the token."""
    virtual_block_index, virtual_block_offset = divmod(token, size * ranks)
    if virtual_block_offset // interleave % ranks != rank:
        return None
    rounds = virtual_block_offset // (interleave * ranks)
    return virtual_block_index, rounds * interleave + virtual_block_offset % interleave

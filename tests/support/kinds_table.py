"""The kinds of KV caches that vLLM has, each with models that have it, and the table of them in docs/models.md."""

import warnings
from collections.abc import Callable
from typing import NamedTuple

from support.cache_kinds import CONTEXT, Shape
from support.tables import PAGE

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    import torch
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Mamba
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        CircularBufferSpec,
        FullAttentionSpec,
        KVQuantMode,
        MambaSpec,
        MLAAttentionSpec,
        RSWASpec,
        SlidingWindowMLASpec,
        SlidingWindowSpec,
        SparseCacheRole,
    )

BEGIN, END = "<!-- written by tests/connector/shell/test_cache_kinds.py -->", "<!-- end -->"
HEADS = {"num_kv_heads": 2, "head_size": 8, "dtype": torch.float16}
LATENT = {"num_kv_heads": 1, "head_size": 16, "dtype": torch.float16}


class Kind(NamedTuple):
    """One kind, and the groups of a model that has it, with blocks of a size."""

    specs: Callable[[int], tuple]
    models: str
    since: str = "0.30"
    engines: str = ""  # what has run on engines with it, too
    is_packed: bool = False  # engines with other blocks or layouts are refused
    caches: bool = True
    lookahead: int = 0

    def shape(self, size=4, **options):
        return Shape(self.specs(size), caches=self.caches, lookahead=self.lookahead, **options)


def full(size):
    return FullAttentionSpec(block_size=size, **HEADS)


def latent(size, **options):
    return MLAAttentionSpec(block_size=size, **{**LATENT, **options})


def window(size, tokens=6, **options):
    return SlidingWindowSpec(block_size=size, sliding_window=tokens, **HEADS, **options)


def replayed(size):
    return SlidingWindowMLASpec(block_size=size, sliding_window=6, bounded_replay=True, **LATENT)


def chunked(size):
    return ChunkedLocalAttentionSpec(block_size=size, attention_chunk_size=8, **HEADS)


def ring(_):
    return CircularBufferSpec(block_size=4, **HEADS)


def state(size, kind=Mamba.MAMBA2, shapes=((3, 8), (2, 4, 4)), mode="align", **options):
    dtypes = (torch.float32,) * len(shapes)
    return MambaSpec(block_size=size, shapes=shapes, dtypes=dtypes, mamba_type=kind, mamba_cache_mode=mode, **options)


ATTENTION, STATES = "tests/models/test_attention.py", "tests/models/test_states.py"
KINDS = {
    "full attention": Kind(lambda size: (full(size),), "most", engines=ATTENTION),
    "latent vectors (MLA)": Kind(lambda size: (latent(size),), "DeepSeek-V2, V3, Kimi K2", engines=ATTENTION),
    "sliding window": Kind(lambda size: (window(size),), "Mistral", engines=ATTENTION),
    "sliding window beside full attention": Kind(
        lambda size: (full(size), window(size)), "Gemma 3, gpt-oss", engines=ATTENTION
    ),
    "windows of several sizes": Kind(lambda size: (full(size), window(size, 9), window(size, 5)), "Step3"),
    "drafts that look ahead (MTP of several modules)": Kind(
        lambda size: (full(size), window(size, extra_retained_tokens=2)), "MiMo-V2", lookahead=3
    ),
    "state, and drafts that look ahead": Kind(
        lambda size: (full(size), state(size, num_speculative_blocks=3)),
        "Qwen3-Next with MTP of several modules",
        since="0.32",
        lookahead=4,
    ),
    "sliding window of latent vectors": Kind(
        lambda size: (latent(size), SlidingWindowMLASpec(block_size=size, sliding_window=6, **LATENT)), "DeepSeek-V4"
    ),
    "replayed window (bounded replay)": Kind(
        lambda size: (latent(size), replayed(size)), "DeepSeek-V4.1", since="0.32"
    ),
    "chunks": Kind(lambda size: (full(size), chunked(size)), "Llama 4", engines=ATTENTION),
    "reference window (R-SWA)": Kind(
        lambda size: (RSWASpec(block_size=size, rswa_window=6, **HEADS),), "Unlimited-OCR"
    ),
    "indexer of sparse attention": Kind(
        lambda size: (
            latent(size),
            latent(size, dtype=torch.uint8, head_size=20, cache_role=SparseCacheRole.INDEXER),
        ),
        "DeepSeek-V3.2",
        is_packed=True,
    ),
    "compressed vectors": Kind(
        lambda size: (latent(size, tokens_per_state=2), ring(size)),
        "DeepSeek-V4, GLM-5-next",
        since="0.32",
        is_packed=True,
    ),
    "circular buffer": Kind(lambda size: (full(size), ring(size)), "GLM-5-next, Qwen4-exp", since="0.32"),
    "circular buffer, compressed vectors, replayed window": Kind(
        lambda size: (latent(size, tokens_per_state=2), replayed(size), ring(size)),
        "DeepSeek-V4.1",
        since="0.32",
        is_packed=True,
    ),
    "quantized with scales of their own (NVFP4, INT8 per head)": Kind(
        lambda size: (
            FullAttentionSpec(
                block_size=size, num_kv_heads=2, head_size=16, dtype=torch.uint8, kv_quant_mode=KVQuantMode.NVFP4
            ),
        ),
        "any with --kv-cache-dtype nvfp4",
        is_packed=True,
    ),
    "state of Mamba 2": Kind(
        lambda size: (full(size), state(size)),
        "Granite 4-H, Falcon-H1, Nemotron-H",
        since="0.32",
        engines=STATES,
    ),
    "state alone, without prefix caching": Kind(
        lambda size: (full(size), state(CONTEXT, mode="none")),
        "Mamba 2, Zamba 2",
        since="0.32",
        engines=STATES,
        caches=False,
    ),
    "state of Mamba 1": Kind(
        lambda size: (full(size), state(size, Mamba.MAMBA1, ((8, 3), (8, 4)))), "Jamba", since="0.32"
    ),
    "state of a gated delta net": Kind(
        lambda size: (full(size), state(size, Mamba.GDN_ATTN)),
        "Qwen3-Next",
        since="0.32",
        engines=STATES,
    ),
    "state of KDA beside latent vectors": Kind(
        lambda size: (latent(size), state(size, Mamba.GDN_ATTN, ((3, 24), (2, 8, 8)))),
        "Kimi Linear, Kimi K3",
        since="0.32",
    ),
    "state of one tensor (short convolution, linear attention)": Kind(
        lambda size: (full(size), state(size, Mamba.SHORT_CONV, ((3, 8),))),
        "LFM2",
        since="0.32",
        engines=STATES,
    ),
    "state with blocks for drafts": Kind(
        lambda size: (full(size), state(size, num_speculative_blocks=2)),
        "Qwen3-Next with MTP",
        since="0.32",
    ),
    "state, window and full attention": Kind(
        lambda size: (full(size), window(size), state(size)), "hybrids of all three", since="0.32"
    ),
    "state, circular buffer and full attention": Kind(
        lambda size: (full(size), ring(size), state(size, Mamba.GDN_ATTN)), "Qwen4-exp", since="0.32"
    ),
}
# What is no kind of its own: who has it, and since which vLLM.
DIVIDED = {
    "ranks that divide a context (DCP): latent vectors, full attention, indexers": (
        "`--decode-context-parallel-size`",
        "0.32",
    ),
    "prompts computed in several contexts (PCP), on P: latent vectors, full attention, indexers": (
        "`--prefill-context-parallel-size`",
        "0.32",
    ),
}
REFUSED = {
    "cross attention": ("Whisper, BART", "vLLM allocates no block for it that a load could fill"),
    "static sinks": ("openPangu", "they are in blocks that no block table names"),
    "hidden states": ("extract_hidden_states", "no decode engine reads them"),
    "several entries for a token (`tokens_per_state` below 1)": ("Whisper, streamed", "not tried"),
    "state of more than two tensors, or with records beside it": (
        "--use-replayssm",
        "its ring means something only with its writer's counters",
    ),
    "caches in host memory (HiSparse)": ("--hisparse", "vLLM's NixlConnector moves them, from 0.32 on"),
    "circular buffer of Step5": ("Step5", "the model itself takes `NixlConnector` by its name, and no other"),
}


def table():
    """Return the rows of the page."""
    rows = ["| kind | models that have it | pull | push | from vLLM | run on engines |", "|---|---|---|---|---|---|"]
    for name, kind in KINDS.items():
        ran = f"`{kind.engines}`" if kind.engines else "no"
        like = "equal engines" if kind.is_packed else "yes"
        rows.append(f"| {name} | {kind.models} | {like} | {like} | {kind.since} | {ran} |")
    rows += [f"| {name} | {models} | yes | yes | {since} | no |" for name, (models, since) in DIVIDED.items()]
    rows += [f"| {name} | {models} | refused | refused | | {why} |" for name, (models, why) in REFUSED.items()]
    return "\n".join(rows)


def written():
    """Return what the page has."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip()


def write():
    """Write the table into the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}")

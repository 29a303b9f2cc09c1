"""Tiny models whose layers keep keys and values, or what those are made of: each exercises another layout of the cache.

They are written by :func:`support.architectures.make`: seeded weights, below 10 MB, in float32.
"""

from support.architectures import HEADS, Architecture

WINDOW = 128  # tokens that a layer with a window, or a chunk, looks back at most
SHARP = {"q_norm": 2.0, "k_norm": 2.0}  # attention as sharp as where the projections are not normed
TOKEN_BYTES, LATENT_BYTES = 2 * 2 * 32 * 4, 576 * 4  # of a token on a layer: K and V of two heads; one vector
LLAMA = HEADS | {"num_hidden_layers": 3, "head_dim": 32}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT = EXPERTS | {
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,  # with 64 for positions: the only size that the CPU build decodes
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


# MLA passes queries in three dimensions. The CPU's rotary kernel takes their heads for tokens there, so that a query
# depends on how many tokens are computed with it; PyTorch's does not. There are neither prefix caching nor chunks.
MLA = {
    "args": ("--compilation-config", '{"custom_ops": ["all", "-rotary_embedding"]}'),
    "caches": False,
    "token_bytes": LATENT_BYTES,
}


def alternating(count, *, full):
    """Return the kind of each of ``count`` layers, every ``full``-th of which looks back to the beginning."""
    return ["sliding_attention" if (layer + 1) % full else "full_attention" for layer in range(count)]


def _attention(name, title, config, **more):
    return Architecture(name, title, config, **{"blocks": 72, "full": 3, "token_bytes": TOKEN_BYTES, **more})


ATTENTION = {
    each.label: each
    for each in (
        _attention("llama", "Llama", LLAMA),
        _attention(
            "llama",
            "Llama, fp8 cache",
            LLAMA,
            label="llama-fp8",
            args=("--kv-cache-dtype", "fp8"),
            token_bytes=TOKEN_BYTES // 4,
        ),
        _attention("qwen3", "Qwen3", LLAMA, scales=SHARP),
        _attention("qwen3_moe", "Qwen3-MoE", LLAMA | EXPERTS | {"num_experts": 4}, scales=SHARP),
        _attention(
            "gemma3_text",
            "Gemma 3 (window 128, every 6th layer full)",
            LLAMA
            | {
                "num_hidden_layers": 6,
                "layer_types": alternating(6, full=6),
                "sliding_window": WINDOW,
                "query_pre_attn_scalar": 32,
                "tie_word_embeddings": True,
            },
            # Its head is its embeddings: it would only say the last token again, if those were not small in the sum.
            scales={
                "embed": 128**-0.5,
                "q_norm": 1.0,
                "k_norm": 1.0,
                "post_attention_layernorm": 2.0,
                "model.norm": 5.0,
            },
            blocks=145,
            full=1,
            near=5,
        ),
        _attention(
            "gemma3n_text",
            "Gemma 3n (the last 2 of 6 layers use the cache of others, window 128 in every other layer)",
            LLAMA
            | {
                "num_hidden_layers": 6,
                "num_kv_shared_layers": 2,
                "layer_types": alternating(6, full=2),
                "sliding_window": WINDOW,
                "intermediate_size": [256] * 6,
                "activation_sparsity_pattern": [0.0] * 6,
                "hidden_size_per_layer_input": 32,
                "vocab_size_per_layer_input": 512,
                "laurel_rank": 16,
                "tie_word_embeddings": True,
            },
            scales={
                "embed": 128**-0.5,
                "q_norm": 2.0,
                "k_norm": 2.0,
                "post_attention_layernorm": 3.0,
                "model.norm": 6.0,
            },
            blocks=90,
            full=2,
            near=2,
        ),
        _attention(
            "mistral",
            "Mistral (window 128 in all layers)",
            LLAMA | {"num_hidden_layers": 6, "sliding_window": WINDOW},  # 762 tokens reach the last one
            blocks=24,
            full=0,
            near=6,
        ),
        _attention(
            "gpt_oss",
            "gpt-oss (sinks, window 128 in every other layer, MoE)",
            LLAMA
            | {
                "num_hidden_layers": 4,
                "layer_types": alternating(4, full=2),
                "sliding_window": WINDOW,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
            },
            blocks=90,
            full=2,
            near=2,
        ),
        _attention(
            "llama4_text",
            "Llama 4 (chunks of 128, every 4th layer full, MoE)",
            LLAMA
            | {
                "num_hidden_layers": 4,
                "attention_chunk_size": WINDOW,
                "intermediate_size_mlp": 256,
                "num_local_experts": 4,
                "num_experts_per_tok": 1,
                "interleave_moe_layer_step": 1,
            },
            blocks=120,
            full=1,
            near=3,
        ),
        _attention(
            "deepseek_v2",
            "DeepSeek-V2 (MLA, MoE)",
            LATENT | {"q_lora_rank": None, "topk_method": "greedy"},
            blocks=144,  # of 16 tokens
            **MLA,
        ),
        _attention(
            "deepseek_v3",
            "DeepSeek-V3 (MLA, MoE)",
            LATENT | {"q_lora_rank": 64, "topk_method": "noaux_tc"},
            blocks=144,  # of 16 tokens
            **MLA,
        ),
    )
}

"""Tiny models whose layers keep a state: configurations, and weights from a seed, each below 10 MB.

Weights are scaled as those of the tiny Llama (``pdrelay_tools/local/model.py``), so that text depends on the whole
prompt, and states forget slowly.
"""

import math
import shutil
from dataclasses import dataclass, field

from pdrelay_tools.local.model import ensure_model

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
GAINS = {"q_proj": 2.0, "k_proj": 2.0, "lm_head": 6.0}  # of a layer's output; others have 1
COMMON = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 4096,
    "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 3,
}  # fmt: skip
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


@dataclass(frozen=True)
class Architecture:
    """What is special about a model; ``name`` is transformers' model type.

    ``step``: in vLLM 0.32's CPU build, decoding a token of some models gives other numbers than computing it with the
    prompt, in one engine by itself (0.1 and more in a logprob). A single engine that computes so many tokens a step
    decodes the last token of a prompt of ``n * step + 1`` tokens, as a decode engine does: such prompts are comparable.
    ``block``: the same where prefixes are cached, whose steps end at blocks of so many tokens. None: a single engine
    dies there.

    ``scales``: weights of one dimension, and how large embeddings are, by a part of their names. ``blocks``: of a
    cache that is too small for eight long answers. ``full``, ``near``: how many layers keep all tokens, and how many a
    window of them; ``token_bytes``: what one keeps of a token.
    """

    name: str
    title: str
    config: dict = field(default_factory=dict)
    dtype: str = "float32"
    step: int = 0
    block: int | None = None
    scales: dict = field(default_factory=dict)
    args: tuple[str, ...] = ()  # of every engine
    blocks: int | None = None
    caches: bool = True  # prefixes, where an engine is told to
    full: int = 0
    near: int = 0
    token_bytes: int = 0
    kind: str = "AutoModelForCausalLM"
    label: str = ""

    def __post_init__(self):
        object.__setattr__(self, "label", self.label or self.name)


ARCHITECTURES = {
    each.name: each
    for each in (
        Architecture(
            "granitemoehybrid",
            "Granite 4-H (Mamba 2, attention, MoE)",
            HEADS
            | {
                "num_hidden_layers": 4,
                "layer_types": ["mamba", "attention", "mamba", "mamba"],
                "mamba_n_heads": 8,
                "mamba_d_head": 32,
                "mamba_d_state": 16,
                "mamba_n_groups": 1,
                "mamba_d_conv": 4,
                "mamba_expand": 2,
                "mamba_chunk_size": 64,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "shared_intermediate_size": 128,
                "attention_multiplier": 0.17,
                "position_embedding_type": "rope",
            },
        ),
        Architecture(
            "lfm2",
            "LFM2 (short convolution, attention)",
            HEADS
            | {
                "num_hidden_layers": 4,
                "layer_types": ["conv", "full_attention", "conv", "conv"],
                "block_dim": 128,
                "conv_dim": 128,
                "conv_L_cache": 3,
                "block_auto_adjust_ff_dim": False,
                "block_ff_dim": 256,
            },
            block=0,
            # This model passes queries in three dimensions. The CPU's rotary kernel takes their heads for tokens there,
            # so that a key depends on how many tokens are computed with it; PyTorch's does not.
            args=("--compilation-config", '{"custom_ops": ["all", "-rotary_embedding"]}'),
        ),
        Architecture(
            "mamba2",
            "Mamba 2",
            {
                "num_hidden_layers": 3,
                "num_heads": 8,
                "head_dim": 32,
                "state_size": 16,
                "n_groups": 1,
                "expand": 2,
                "conv_kernel": 4,
                "chunk_size": 64,
                "rms_norm": True,
            },
        ),
        Architecture(
            "qwen3_next",
            "Qwen3-Next (gated delta net, attention, MoE)",
            HEADS
            | {
                "num_hidden_layers": 4,
                "head_dim": 64,
                "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 64,
                "linear_value_head_dim": 64,
                "linear_conv_kernel_dim": 4,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 64,
                "shared_expert_intermediate_size": 64,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            },
            dtype="bfloat16",
            step=64,
            block=160,
        ),
        Architecture(
            "falcon_h1",
            "Falcon-H1 (Mamba 2 beside attention)",
            HEADS
            | {
                "num_hidden_layers": 3,
                "head_dim": 32,
                "mamba_d_ssm": 256,
                "mamba_n_heads": 8,
                "mamba_d_head": 32,
                "mamba_n_groups": 1,
                "mamba_d_state": 16,
                "mamba_d_conv": 4,
                "mamba_chunk_size": 64,
                "mamba_expand": 2,
            },
        ),
        Architecture(
            "nemotron_h",
            "Nemotron-H (Mamba 2, attention)",
            HEADS
            | {
                "layers_block_type": ["mamba", "attention", "mamba", "mlp", "mamba"],
                "head_dim": 32,
                "mamba_num_heads": 8,
                "mamba_head_dim": 32,
                "ssm_state_size": 16,
                "n_groups": 1,
                "conv_kernel": 4,
                "expand": 2,
                "chunk_size": 64,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 64,
                "moe_shared_expert_intermediate_size": 64,
                "n_group": 1,
                "topk_group": 1,
            },
        ),
        Architecture(
            "zamba2",
            "Zamba 2 (Mamba 2, shared attention)",
            HEADS
            | {
                "num_hidden_layers": 4,
                "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
                "num_key_value_heads": 4,
                "mamba_d_state": 16,
                "mamba_d_conv": 4,
                "mamba_expand": 2,
                "mamba_ngroups": 1,
                "n_mamba_heads": 8,
                "mamba_headdim": 32,
                "chunk_size": 64,
                "num_mem_blocks": 1,
                "use_shared_attention_adapter": False,
                "adapter_rank": 8,
                "use_mem_rope": True,
            },
        ),
    )
}


def make(architecture, directory):
    """Write a model and return its directory. The weights depend on nothing but the architecture."""
    import torch
    import transformers

    base = directory.with_name(f"{directory.name}-tokenizer")
    ensure_model(base)
    values = COMMON | architecture.config
    config = transformers.AutoConfig.for_model(architecture.name, **values)
    torch.manual_seed(19)
    model = getattr(transformers, architecture.kind).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            _scale(torch, name, weight, architecture.scales)
    model.to(getattr(torch, architecture.dtype)).save_pretrained(directory)
    shutil.rmtree(directory / "generation_config.json", ignore_errors=True)
    for name in TOKENIZER:
        shutil.copy(base / name, directory / name)
    return directory


def _scale(torch, name, weight, scales):
    """Draw a matrix anew so that its output is as large as its input; let states forget within thousands of tokens."""
    last = name.split(".")[-1]
    if last == "A_log":
        weight.copy_(torch.log(torch.rand_like(weight) * 0.05 + 0.001))
    elif last == "dt_bias":
        weight.fill_(-3.0)
    elif "conv" in name and weight.dim() == 3:
        weight.normal_(0, 1 / math.sqrt(weight.shape[-1]))
    elif "embed" in name:
        weight.normal_(0, scales.get("embed", 1))
    elif weight.dim() == 1 and any(part in name for part in scales):
        weight.fill_(next(value for part, value in scales.items() if part in name))
    elif weight.dim() >= 2:
        gain = next((gain for part, gain in GAINS.items() if part in name), 1.0)
        weight.normal_(0, gain / math.sqrt(weight.shape[-1]))


def size_of(directory):
    """Return how many bytes a model's files have."""
    return sum(path.stat().st_size for path in directory.iterdir())

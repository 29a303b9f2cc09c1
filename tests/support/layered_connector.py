"""Our connector on a CPU whose attention kernel has the layers of a block side by side (BLHNC), as GPU kernels may.

vLLM 0.32 lists LBHNC alone for its CPU kernel, "the CPU backend only reads head-major block interiors": BLHNC has such
interiors, too, and the kernel takes a block's stride from its tensor.
"""

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_layout import KVCacheLayout

from pdrelay_connector.shell.connector import PDRelayConnector


class LayeredConnector(PDRelayConnector):
    """Loaded before vLLM asks the kernels for their layouts."""


CPUAttentionBackend.supported_kv_cache_layouts = classmethod(lambda _: (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC))

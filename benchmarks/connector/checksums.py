"""What the checksums of sampled blocks cost each engine, in CPU time of the thread that takes them.

``nice .venv/bin/python -m benchmarks.connector.checksums`` prints the table of
docs/connector-leases.md: a cache in host memory as Llama 3.1 8B has it on one rank (32 layers, 8 KV
heads of 128 dimensions, bfloat16, blocks of 16 tokens), in the layout that the connector asks for.
Medians of five runs.
"""

import statistics
import time
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    import torch

    from pdrelay_connector.shell.cache_reader import TensorReader
    from pdrelay_connector.shell.cache_regions import KernelLayout, describe_caches
    from pdrelay_connector.shell.engine_config import EngineConfig

from pdrelay_connector.core.ids import Address, BlockId, EngineId, RequestId
from pdrelay_connector.core.layout.cache_groups import CacheGroup
from pdrelay_connector.core.verify.comparison import sums_of
from pdrelay_connector.core.verify.sampling import Sampling

LAYERS = 32
HEADS = 8
DIMENSIONS = 128
TOKENS = 16
BLOCKS = 256
RUNS = 5
PROMPT = 128  # blocks
# prefills a second of one engine; the settings of docs/connector-leases.md
RATE = 20
SHARE = 0.01
SAMPLED = 8


def reader():
    """Return the reader of such a cache, and the bytes of a block."""
    caches = {
        f"layers.{layer}": torch.randint(
            0, 99, (BLOCKS, HEADS, TOKENS, 2 * DIMENSIONS), dtype=torch.int16
        )
        for layer in range(LAYERS)
    }
    engine_config = EngineConfig(
        EngineId("e"), Address("127.0.0.1", 1), (CacheGroup(TOKENS),), dict.fromkeys(caches, 0), BLOCKS, HEADS, 1,
        is_producer=True, is_consumer=True,
    )  # fmt: skip
    regions = describe_caches(caches, engine_config, BLOCKS, KernelLayout.ENTRIES)
    return TensorReader(caches, regions, (0,)), sum(
        cache[0].numel() * 2 for cache in caches.values()
    )


def cpu_seconds(call, times):
    """Return the CPU time of one call on this thread: the median of some runs."""
    found = []
    for _ in range(RUNS):
        begun = time.thread_time()
        for _ in range(times):
            call()
        found.append((time.thread_time() - begun) / times)
    return statistics.median(found)


def main():
    cache, block_bytes = reader()
    sampling = Sampling(1.0, SAMPLED)
    name = RequestId("cmpl-0")
    prompt = [list(map(BlockId, range(1, PROMPT + 1)))]

    def sums():
        blocks = sampling.choose(
            name, prompt, sizes={0: TOKENS}, states=set(), tokens=PROMPT * TOKENS
        )
        return sums_of(0, blocks, cache)

    one = cpu_seconds(lambda: cache.checksum(0, BlockId(7), 0, TOKENS), 20)
    request = cpu_seconds(sums, 3)
    asked = cpu_seconds(lambda: sampling.takes(name), 10000)
    print("| | |\n|---|---|")
    print(f"| a block of {block_bytes / 2**20:.0f} MiB | {1e3 * one:.2f} ms |")
    print(f"| CPU seconds for a GB | {one / block_bytes * 1e9:.2f} |")
    print(f"| a sampled request, {SAMPLED} blocks of {PROMPT} | {1e3 * request:.1f} ms |")
    print(f"| a request that is not sampled | {1e6 * asked:.2f} µs |")
    share = RATE * (SHARE * request + asked)
    print(
        f"| share of a core at {RATE} prefills a second and `verify_share` {SHARE:g} | "
        f"{100 * share:.2f} % |"
    )


if __name__ == "__main__":
    main()

"""Two engines' connectors with real NIXL, sockets and threads: what vLLM calls on the scheduler and the worker.

The test plays vLLM, and lends the memory.
"""

import time
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    import torch
    from vllm.v1.core.block_pool import BlockPool

    from pdrelay_connector.shell.cache_regions import KernelLayout
    from pdrelay_connector.shell.engine_config import EngineConfig, WorkerRank
    from pdrelay_connector.shell.engine_waker import EngineWaker
    from pdrelay_connector.shell.metadata import StepMetadata
    from pdrelay_connector.shell.scheduler import PDRelayConnectorScheduler
    from pdrelay_connector.shell.worker import PDRelayConnectorWorker

from pdrelay_connector.core.ids import Address, BlockId, EngineId, RequestId
from pdrelay_connector.core.layout.cache_groups import CacheGroup
from pdrelay_connector.core.layout.transfer_plan import TokenRange
from pdrelay_connector.core.lease.kv_params import PullParams, PushParams
from pdrelay_connector.core.messages import LentBlocks
from pdrelay_connector.core.pull.load import LoadOrder
from pdrelay_connector.core.push.expected_push import PushOrder
from pdrelay_connector.core.push.push_job import ComputedBlocks
from pdrelay_connector.settings import Settings
from support.cluster import free_ports
from support.engines import FINGERPRINT

BLOCKS = 64
SIZE = 16
LAYERS = 3
WHOLE = [BlockId(block) for block in range(1, BLOCKS)]
TOKENS = len(WHOLE) * SIZE
PARTS = 16  # blocks in host memory: less than a prompt, which then comes in parts


class ConnectorProcess:
    """One engine's connector. Its memory is lent by the test, which plays vLLM."""

    def __init__(self, name, mode, staging, *, timeout=20.0):
        (port,) = free_ports(1)
        settings = Settings(
            mode=mode, host="127.0.0.1", port=port, transfer_timeout=timeout, retry_after=0.1,
            handshake_threads=1,  # a pool of more has them when it first needs them at the same time
        )  # fmt: skip
        layers = {f"l.{layer}": 0 for layer in range(LAYERS)}
        self.config = EngineConfig(
            EngineId(name), Address("127.0.0.1", port), (CacheGroup(SIZE),), layers, BLOCKS, all_heads=1, ranks=1,
            is_producer=True, is_consumer=True, sleeps=True, staging_blocks=staging,
        )  # fmt: skip
        self.caches = {layer: torch.zeros(BLOCKS, 1, SIZE, 512, dtype=torch.int32) for layer in layers}
        self.worker = PDRelayConnectorWorker(self.config, settings, WorkerRank(0))
        self.scheduler = PDRelayConnectorScheduler(self.config, settings, EngineWaker(None))
        self.worker.register_kv_caches(self.caches, FINGERPRINT, KernelLayout.ENTRIES)
        self.pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=SIZE)
        self.scheduler.bind_gpu_block_pool(self.pool)
        self.scheduler.start({0: self.worker.get_handshake_metadata()}, FINGERPRINT)
        self.numbers = {}

    @property
    def engine(self):
        return self.scheduler._prefills.engine

    def sleep(self):
        """As vLLM does it; the memory goes."""
        self.scheduler.fall_asleep()
        self.worker.unregister_kv_caches()
        for cache in self.caches.values():
            cache.fill_(-1)

    def wake_up(self):
        """The memory is back, with anything in it."""
        self.worker.restore_kv_caches()
        self.scheduler.start({0: self.worker.get_handshake_metadata()}, FINGERPRINT)

    def fill(self, seed):
        for number, cache in enumerate(self.caches.values()):
            cache.copy_(content(seed, number, cache.shape))

    def post(self, command):
        self.scheduler._control.post(command)

    def count(self, name):
        """Return how often something was counted so far."""
        for stats in (self.worker.get_kv_connector_stats(), self.scheduler.get_kv_connector_stats()):
            for each, count in (stats.data["counters"] if stats is not None else {}).items():
                self.numbers[each] = self.numbers.get(each, 0) + count
        return self.numbers.get(name, 0)

    def load(self, name, p, engine):
        """Order a read, wait for its end, and return whether it failed."""
        self.order(name, p, engine)
        return self.wait(name, p)

    def order(self, name, p, engine, blocks=WHOLE):
        """Order a read. P does not hear of it before it has ended: no ``ReadsStarted`` is sent."""
        request = RequestId(name)
        address = p.config.address
        tokens = len(blocks) * SIZE
        offer = PullParams(engine, request, *address, (tuple(blocks),), tokens)
        self.post(lambda control, now: control.lease_renewer.start_renewing(request, offer, now=now))
        whole = TokenRange(0, 0, tokens, blocks, blocks)
        self.worker.start_load_kv(StepMetadata([LoadOrder(request, request, engine, address, (whole,))]))

    def wait(self, name, p):
        """Wait for the end of a read, and return whether it failed."""
        until = time.monotonic() + 60
        while name not in (results := self.worker.get_transfer_results()).finished_recving:
            assert time.monotonic() < until, "the load did not end"
            self.scheduler.handle_results()
            p.scheduler.handle_results()
            time.sleep(0.005)
        return name in results.failed_recving

    def push(self, name, d):
        """Write a prompt into another engine, which lends its blocks, and wait for the end."""
        request = RequestId(name)
        before = d.count("loads")
        lent = (LentBlocks(0, TOKENS, tuple(WHOLE)),)
        order = PushOrder(request, request, self.engine, self.config.address, "digest", lent)
        params = PushParams(self.engine, *self.config.address, request, request)
        d.post(lambda control, now: control.lease_renewer.start_renewing(request, params, now=now))
        d.post(lambda control, now: control.push_receiver.expect(order, now=now))
        self.lend(request, pushed=True)
        self.worker.add_computed([ComputedBlocks(request, "digest", 0, [WHOLE], TOKENS, last=True)])
        until = time.monotonic() + 60
        while d.count("loads") == before:
            assert time.monotonic() < until, "the push did not end"
            time.sleep(0.01)
        d.scheduler._control.take_results()  # of a request that vLLM does not have

    def lend(self, name, *, pushed=False):
        """Lease the one block of a prompt: what is read beside it is the test's own."""
        assert self.scheduler._prefills.hold(RequestId(name), [self.pool.blocks[1]], 0)
        self.post(lambda control, now: control.grant(RequestId(name), now=now, pushed=pushed))

    def stop(self):
        self.worker.shutdown()
        self.scheduler.shutdown()


def content(seed, number, shape):
    return torch.randint(2**30, shape, generator=torch.Generator().manual_seed(seed + number), dtype=torch.int32)


def same_as(seed, d):
    return all(
        torch.equal(content(seed, number, cache.shape)[1:], cache[1:]) for number, cache in enumerate(d.caches.values())
    )


def same(p, d):
    return all(torch.equal(p.caches[name][1:], d.caches[name][1:]) for name in p.caches)

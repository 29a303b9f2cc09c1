"""Sleep and wake with real NIXL, sockets and threads: what vLLM calls on the scheduler and the worker of two engines.

What an engine's memory holds is lost when it sleeps, as on a GPU.
"""

import socket
import time
import warnings

import pytest

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
from pdrelay_connector.core.push.decode_scheduler import PushOrder
from pdrelay_connector.core.push.push_job import ComputedBlocks
from pdrelay_connector.settings import Mode, Settings
from support.engines import FINGERPRINT
from support.proc import held_by

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(240)]
BLOCKS, SIZE, LAYERS = 64, 16, 3
WHOLE = [BlockId(block) for block in range(1, BLOCKS)]
TOKENS = len(WHOLE) * SIZE
PARTS = 16  # blocks in host memory: less than a prompt, which then comes in parts


class Process:
    """One engine's connector. Its memory is lent by the test, which plays vLLM."""

    def __init__(self, name, mode, staging):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        settings = Settings(
            mode=mode, host="127.0.0.1", port=port, transfer_timeout=20.0, retry_after=0.1,
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
        self.worker.register(self.caches, FINGERPRINT, KernelLayout.ENTRIES)
        self.pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=SIZE)
        self.scheduler.bind_block_pool(self.pool)
        self.scheduler.start({0: self.worker.handshake()}, FINGERPRINT)
        self.numbers = {}

    @property
    def engine(self):
        return self.scheduler._prefills.engine

    def sleep(self):
        """As vLLM does it; the memory goes."""
        self.scheduler.fall_asleep()
        self.worker.unregister()
        for cache in self.caches.values():
            cache.fill_(-1)

    def wake_up(self):
        """The memory is back, with anything in it."""
        self.worker.restore()
        self.scheduler.start({0: self.worker.handshake()}, FINGERPRINT)

    def fill(self, seed):
        for number, cache in enumerate(self.caches.values()):
            cache.copy_(content(seed, number, cache.shape))

    def post(self, command):
        self.scheduler._control.post(command)

    def count(self, name):
        """Return how often something was counted so far."""
        for stats in (self.worker.stats(), self.scheduler.stats()):
            for each, count in (stats.data["counters"] if stats is not None else {}).items():
                self.numbers[each] = self.numbers.get(each, 0) + count
        return self.numbers.get(name, 0)

    def load(self, name, p, engine):
        """Order a read, wait for its end, and return whether it failed."""
        self.order(name, p, engine)
        return self.wait(name, p)

    def order(self, name, p, engine):
        """Order a read. P does not hear of it before it has ended: no ``ReadsStarted`` is sent."""
        request, address = RequestId(name), p.config.address
        offer = PullParams(engine, request, *address, (tuple(WHOLE),), TOKENS)
        self.post(lambda control, now: control.lease_renewer.start_renewing(request, offer, now=now))
        whole = TokenRange(0, 0, TOKENS, WHOLE, WHOLE)
        self.worker.load(StepMetadata([LoadOrder(request, request, engine, address, (whole,))]))

    def wait(self, name, p):
        """Wait for the end of a read, and return whether it failed."""
        until = time.monotonic() + 60
        while name not in (results := self.worker.results()).finished_recving:
            assert time.monotonic() < until, "the load did not end"
            self.scheduler.handle_results()
            p.scheduler.handle_results()
            time.sleep(0.005)
        return name in results.failed_recving

    def lend(self, name, *, pushed=False):
        """Lease the one block of a prompt: what is read beside it is the test's own."""
        assert self.scheduler._prefills.hold(RequestId(name), [self.pool.blocks[1]], 0)
        self.post(lambda control, now: control.grant(RequestId(name), now=now, pushed=pushed))

    def stop(self):
        self.worker.stop()
        self.scheduler.stop()


@pytest.fixture
def start():
    started = []

    def start(mode, staging=0):
        started.extend(Process(name, mode, staging) for name in ("p", "d"))
        return started

    yield start
    for process in started:
        process.stop()


def content(seed, number, shape):
    return torch.randint(2**30, shape, generator=torch.Generator().manual_seed(seed + number), dtype=torch.int32)


def same_as(seed, d):
    return all(
        torch.equal(content(seed, number, cache.shape)[1:], cache[1:]) for number, cache in enumerate(d.caches.values())
    )


def same(p, d):
    return all(torch.equal(p.caches[name][1:], d.caches[name][1:]) for name in p.caches)


@pytest.mark.parametrize("staging", [0, PARTS])
def test_kv_is_read_after_both_have_slept_and_not_across(start, staging):
    """The same port, another generation: what was offered before is refused, and nothing is read."""
    p, d = start(Mode.PULL, staging)
    p.fill(1)
    p.lend("a")
    before = p.engine
    assert not d.load("a", p, before)
    assert same(p, d)
    for process in (p, d):
        process.sleep()
        process.wake_up()
    p.fill(2)
    p.lend("b")
    d.caches["l.0"].fill_(7)

    assert d.load("b", p, before)  # whoever names the engine of before gets nothing of the one of now
    assert (d.caches["l.0"] == 7).all()
    assert (before, p.engine) == ("p", "p_gen1")
    p.lend("c")
    assert not d.load("c", p, p.engine)
    assert same(p, d)


def test_who_asks_an_engine_that_sleeps_is_told_so(start, caplog):
    """Over the real side channel, too."""
    p, d = start(Mode.PULL)
    p.fill(1)
    p.lend("a")
    p.sleep()

    assert d.load("a", p, EngineId("p"))
    assert "this engine sleeps" in caplog.text
    p.wake_up()


@pytest.mark.parametrize("transports", ["tcp", "all"])
def test_a_read_that_p_has_not_heard_of_counts_for_nothing(start, monkeypatch, transports):
    """Its word may be on the way when P revokes. P's memory goes meanwhile, and neither engine comes to harm."""
    monkeypatch.setenv("UCX_TLS", transports)
    p, d = start(Mode.PULL)
    p.lend("first")
    assert not d.load("first", p, p.engine)
    failed = []
    for number in range(20):
        p.fill(number)
        name = f"r{number}"
        p.lend(name)
        d.order(name, p, p.engine)
        time.sleep(number % 10 * 0.001)
        p.sleep()
        failed.append(d.wait(name, p))
        is_right = same_as(number, d)
        assert failed[-1] or is_right, "what does not count was taken"
        p.wake_up()
        p.fill(1000 + number)
        p.lend(f"again {number}")
        assert not d.load(f"again {number}", p, p.engine)
        assert same(p, d)

    assert any(failed)


@pytest.mark.parametrize("staging", [0, BLOCKS])
def test_kv_is_pushed_after_both_have_slept(start, staging):
    """P's worker finds its scheduler under its new name, and D lends the memory that it has now."""
    p, d = start(Mode.PUSH, staging)
    for number in range(2):
        name = RequestId(f"t{number}")
        p.fill(number)
        lent = (LentBlocks(0, TOKENS, tuple(WHOLE)),)
        order = PushOrder(name, name, p.engine, p.config.address, "digest", lent)
        params = PushParams(p.engine, *p.config.address, name, name)
        d.post(
            lambda control, now, name=name, params=params: control.lease_renewer.start_renewing(name, params, now=now)
        )
        d.post(lambda control, now, order=order: control.push_receiver.expect(order, now=now))
        p.lend(name, pushed=True)
        p.worker.add_computed([ComputedBlocks(name, "digest", 0, [WHOLE], TOKENS, last=True)])
        until = time.monotonic() + 60
        while not d.count("loads") > number:
            assert time.monotonic() < until, "the push did not end"
            time.sleep(0.01)
        d.scheduler._control.take_results()  # of a request that vLLM does not have

        assert same(p, d)
        for process in (d, p):
            process.sleep()
            process.wake_up()


@pytest.mark.parametrize("staging", [0, PARTS])
def test_many_sleeps_cost_nothing(start, staging):
    """Reinforcement learning has engines sleep after each step: sockets, memory and threads must not add up."""
    p, d = start(Mode.PULL, staging)
    sizes = []
    for number in range(30):
        p.lend(f"r{number}")
        assert not d.load(f"r{number}", p, p.engine)
        p.sleep()
        p.wake_up()
        if number >= 10:
            sizes.append(held_by("self"))

    # What opens connections ends a moment later than they do: the least of several looks is what stays.
    memory, files, threads = (
        [min(looks) for looks in (of_all[:5], of_all[-5:])] for of_all in zip(*sizes, strict=True)
    )
    assert files[1] <= files[0] + 2
    assert memory[1] <= memory[0] + 20e6
    assert threads[1] <= threads[0]

"""An engine's connector without the engine: real NIXL, real sockets and real threads, in a process of its own.

``python -m support.nixl_process NAME PORT BLOCK_BYTES MODE STAGES RANKS DEVICE TIMEOUT`` is driven by one JSON object a
line on stdin, and answers each with one on stdout; loads that end are told as ``{"result": ...}`` in between.
:class:`NixlProcess` is the other end of it.

NIXL is held to TCP unless a test says otherwise: on one machine it would read the other process's memory by itself, and
never wait for it. The blocks are in host memory, or where a test says (``device_memory``).
"""

import hashlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

from support.device_memory import HOST, allocate, binding_of, place_of
from support.proc import wait_stopped

BLOCKS = 64
LAYERS = 3
HEADS = 2
ALL = list(range(1, BLOCKS + 1))  # block 0 is vLLM's null block: it is never moved
TOKENS = 16  # of a block
BIG = 1 << 19  # bytes of a block: all of them take long enough to be interrupted
TIMEOUT = 12.0  # s for a transfer; a busy machine may keep a process that is well from its core for seconds
SHORT = 5.0  # the same, where something hangs and the test waits for that
HEARTBEAT = 0.5  # s
LEASE = 30.0
OVER_LOOPBACK = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
TOKEN = b"a worker of this very engine"


class NixlProcess:
    """Starts one and talks to it. Usable as a context manager."""

    def __init__(
        self, name, *, port=0, block_bytes=1 << 15, mode="pull", stages=(LAYERS,), ranks=1, device=HOST, ucx=None,
        timeout=TIMEOUT,
    ):  # fmt: skip
        shape = ",".join(map(str, stages)), ranks, device, timeout
        path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "support.nixl_process", name, *map(str, (port, block_bytes, mode, *shape))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            env={**os.environ, "PYTHONPATH": path, **(OVER_LOOPBACK if ucx is None else ucx), "UCX_LOG_LEVEL": "fatal"},
        )  # fmt: skip
        self._answers = queue.Queue()
        self._results = {}
        self._news = threading.Condition()
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()
        self.engine = self.port = None  # known once it is ready

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        self._listener.join(10)
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()

    def ready(self):
        """Wait until it listens."""
        self.engine, self.port = self._answers.get(timeout=50)["host"]
        return self

    def ask(self, do, **fields):
        """Have it do something, and return what it says."""
        self.process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        return self._answers.get(timeout=20)

    def load(self, request, producer, blocks, into):
        """Load blocks that another process lends under the same name."""
        at = {"engine": producer.engine, "port": producer.port}
        self.ask("load", request=request, **at, blocks=list(blocks), into=list(into))

    def expect(self, request, writer, into, *, first=0):
        """Push: lend blocks to another process that will write a transfer of the same name into them."""
        at = {"engine": writer.engine, "port": writer.port}
        self.ask("expect", request=request, **at, first=first, into=list(into))

    def push(self, request, blocks, *, last=True, attempt=0):
        """Push: these blocks are computed; the last ones make the prompt complete, and leased."""
        self.ask("push", request=request, blocks=list(blocks), last=last, attempt=attempt)

    def result(self, request, timeout=15.0):
        """Wait for the end of a load."""
        with self._news:
            assert self._news.wait_for(lambda: request in self._results, timeout), f"{request} never ended"
        return self._results[request]

    def forget(self, *requests):
        """Wait for new results of requests that have ended."""
        with self._news:
            for request in requests:
                del self._results[request]

    def released(self, request, timeout=15.0):
        """Wait until nothing can write any more into the blocks of a load that lingered."""
        self.result(f"{request} let go", timeout)

    def quarantined(self, request):
        """Whether NIXL may still write into the blocks of a load that failed."""
        return self._results[request].quarantined and f"{request} let go" not in self._results

    def wait_written(self, block, before, timeout=15.0):
        """Wait until a transfer has begun: a block is not any more what its ``digest`` was."""
        end = time.monotonic() + timeout
        while self.digest(block) == before:
            assert time.monotonic() < end, f"nothing is written into block {block}"

    def digest(self, block):
        (digest,) = self.ask("digests", blocks=[block])["digests"]
        return digest

    def freeze(self):
        self.process.send_signal(signal.SIGSTOP)
        wait_stopped(self.process.pid)

    def thaw(self):
        self.process.send_signal(signal.SIGCONT)

    def kill(self):
        self.process.kill()
        self.process.wait()  # how soon the kernel has ended it says nothing about us

    def _listen(self):
        for line in self.process.stdout:
            said = json.loads(line)
            if "result" not in said:
                self._answers.put(said)
                continue
            with self._news:
                self._results[said.pop("result")] = SimpleNamespace(**said)
                self._news.notify_all()
        self._answers.put({"exited": self.process.wait()})  # ready() then fails at once


def same(source, blocks, target, into):
    """Whether blocks of one process hold what blocks of another do."""
    return source.ask("digests", blocks=blocks) == target.ask("digests", blocks=into)


class Engine:
    """What the shell builds of the connector, with numpy instead of torch: all workers in one process.

    ``stages``: layers of each pipeline stage; ``ranks``: of each stage.
    """

    def __init__(self, name, port, block_bytes, mode, stages, ranks, device, timeout):
        from pdrelay_connector.core.control import ControlPlane
        from pdrelay_connector.core.counters import Counters
        from pdrelay_connector.core.ids import Address, EngineEndpoint, EngineId
        from pdrelay_connector.core.lease.decode_scheduler import LeaseRenewer
        from pdrelay_connector.core.lease.lease_table import LeaseTable
        from pdrelay_connector.core.lease.prefill_scheduler import LeaseManager
        from pdrelay_connector.core.messages import PROTOCOL, RankInfo, Welcome
        from pdrelay_connector.core.pull.decode_worker import PullReader
        from pdrelay_connector.core.push.decode_scheduler import PushReceiver
        from pdrelay_connector.core.push.prefill_scheduler import PushCoordinator
        from pdrelay_connector.core.push.prefill_worker import PushWriter
        from pdrelay_connector.core.session.handshake import HandshakeClient, HandshakeServer
        from pdrelay_connector.core.session.peers import PeerTable
        from pdrelay_connector.io.link import SocketLink
        from pdrelay_connector.io.nixl import NixlTransferAgent, make_agent, register
        from pdrelay_connector.io.runner import Runner
        from pdrelay_connector.io.tls import Tls
        from pdrelay_connector.settings import Settings
        from support.engines import FINGERPRINT

        def secrets():
            return (b"secret",)

        def link(engine):
            return SocketLink(HandshakeClient(engine, secrets), Tls(Settings()), Counters(), timeout=5.0, threads=8)

        # Of each worker: layers, blocks, bytes of its heads.
        self.memories = [
            allocate(device, (layers, BLOCKS + 1, block_bytes // ranks))
            for layers in stages for _ in range(ranks)
        ]  # fmt: skip
        self.ranks, self.waiting = ranks, {}  # request -> results of the workers that have ended their load
        self.started = {}
        self.computed = Counter()  # blocks of each attempt of a prefill
        engine = EngineId(name)
        place = place_of(device)
        agents, infos = [], []
        for worker, memory in enumerate(self.memories):
            stage, rank = divmod(worker, ranks)
            agents.append(make_agent(f"{engine}/{worker}", progress_delay_us=1000, bind=binding_of(device)))
            metadata = register(agents[-1], *place, [(memory.address, memory.nbytes)])
            first = sum(stages[:stage])
            regions = tuple(region_of(memory, layer, first + layer, ranks) for layer in range(stages[stage]))
            infos.append(RankInfo(rank, ranks, metadata, *place, regions, stage=stage, stages=len(stages)))
        tokens = {info.worker: TOKEN + bytes([info.worker]) for info in infos}
        counters = Counters()
        listener = link(engine)
        host = HandshakeServer(Welcome(PROTOCOL, engine, FINGERPRINT, tuple(infos)), secrets, "127.0.0.1")
        address = listener.listen(Address("127.0.0.1", port), host)
        peers = PeerTable(listener, FINGERPRINT, counters, retry_after=0.2, ranks=infos)
        lease_manager = LeaseManager(listener, LeaseTable(duration=LEASE, extension=LEASE * 2 / 3), counters)
        lease_renewer = LeaseRenewer(listener, peers, counters, heartbeat_interval=HEARTBEAT)
        push_coordinator = push_receiver = None
        if mode == "push":
            push_coordinator = PushCoordinator(
                listener, lease_manager, counters, tokens=tokens, registration_timeout=LEASE
            )
            push_receiver = PushReceiver(
                listener, peers, lease_renewer, counters, infos, timeout=LEASE, peer_timeout=timeout - HEARTBEAT
            )
        control = ControlPlane(
            lease_manager, lease_renewer, peers, counters,
            push_coordinator=push_coordinator, push_receiver=push_receiver,
        )  # fmt: skip
        self.control = Runner("control", control, listener, self.tell_news)
        self.transfers = []
        for agent, own in zip(agents, infos, strict=True):
            worker = link(engine)
            mover = NixlTransferAgent(agent, *place)
            if mode == "push":
                core = PushWriter(
                    worker, mover, Counters(), own,
                    scheduler_endpoint=EngineEndpoint(engine, address), token=tokens[own.worker], timeout=timeout,
                )  # fmt: skip
            else:
                peers = PeerTable(worker, FINGERPRINT, Counters(), retry_after=0.2)
                core = PullReader(worker, mover, peers, Counters(), own, timeout=timeout)
            told = self.tell_results if mode == "pull" else lambda _: None
            begin = binding_of(device) or (lambda: None)
            self.transfers.append(Runner("transfer", core, worker, told, begin=begin))
        self.control.start()
        for transfer in self.transfers:
            transfer.start()
        say(host=(engine, address.port))

    def tell_results(self, reader):
        """On the thread of a worker: tell what has ended on all of them, as vLLM does."""
        from pdrelay_connector.core.results import LoadResult

        for ended in reader.take_results():
            if isinstance(ended, LoadResult):
                with _speaking:
                    results = self.waiting.setdefault(ended.request, [])
                    results.append(ended)
                    failed = next((each for each in results if each.failure), ended)
                if len(results) == len(self.memories):
                    self.tell([failed])
            else:
                self.tell([ended])

    def tell_news(self, control):
        control.counters.take_report()
        self.tell(control.take_results(now=time.monotonic()))

    def tell(self, news):
        from pdrelay_connector.core.results import BlocksReleased, LoadResult

        for ended in news:
            match ended:
                case LoadResult(request, failure, quarantined):
                    seconds = time.monotonic() - self.started[request]
                    say(result=request, failure=failure, quarantined=quarantined, seconds=seconds)
                case BlocksReleased(request):
                    say(result=f"{request} let go", failure="", quarantined=False, seconds=0.0)

    def lend(self, requests):
        for request in requests:
            self.control.post(lambda control, now, request=request: control.lease_manager.grant(request, now=now))
        return {}

    def load(self, request, engine, port, blocks, into):
        from pdrelay_connector.core.ids import Address
        from pdrelay_connector.core.layout.transfer_plan import TokenRange
        from pdrelay_connector.core.pull.load import LoadOrder

        self.started[request] = time.monotonic()
        whole = TokenRange(0, 0, len(blocks) * TOKENS, blocks, into)
        order = LoadOrder(request, request, engine, Address("127.0.0.1", port), (whole,))
        for transfer in self.transfers:
            transfer.post(lambda reader, now: reader.load(order, now=now))
        return {}

    def expect(self, request, engine, port, first, into):
        from pdrelay_connector.core.ids import Address
        from pdrelay_connector.core.lease.kv_params import PushParams
        from pdrelay_connector.core.messages import LentBlocks
        from pdrelay_connector.core.push.expected_push import PushOrder

        self.started[request] = time.monotonic()
        lent = LentBlocks(first * TOKENS, (first + len(into)) * TOKENS, tuple(into))
        booking = PushParams(engine, "127.0.0.1", port, request, request)
        ticket = PushOrder(request, request, engine, Address("127.0.0.1", port), None, (lent,))
        self.control.post(lambda control, now: control.lease_renewer.start_renewing(request, booking, now=now))
        self.control.post(lambda control, now: control.push_receiver.expect(ticket, now=now))
        return {}

    def abort(self, request):
        self.control.post(lambda control, now: control.push_receiver.stop(request))
        return {}

    def push(self, request, blocks, last, attempt):
        from pdrelay_connector.core.push.push_job import ComputedBlocks

        if last:
            self.control.post(lambda control, now: control.grant(request, now=now))
        self.computed[request, attempt] += len(blocks)
        piece = ComputedBlocks(request, None, attempt, [blocks], self.computed[request, attempt] * TOKENS, last)
        for transfer in self.transfers:
            transfer.post(lambda writer, now: writer.add_computed(piece, now=now))
        return {}

    def fill(self, seed):
        for worker, memory in enumerate(self.memories):
            memory.fill((seed, worker))
        return {}

    def paint(self, blocks, value):
        for memory in self.memories:
            memory.paint(blocks, value)
        return {}

    def files(self):
        return {"files": len(list(Path("/proc/self/fd").iterdir()))}

    def digests(self, blocks):
        return {"digests": [hashlib.blake2b(self._block(block)).hexdigest() for block in blocks]}

    def _block(self, block):
        """Return a block of all workers, layer by layer, and in each layer head by head."""
        stages = [self.memories[first : first + self.ranks] for first in range(0, len(self.memories), self.ranks)]
        return b"".join(
            memory.block(layer, block) for stage in stages for layer in range(stage[0].shape[0]) for memory in stage
        )


def region_of(memory, layer, number, ranks):
    """Head after head; of each, K and V of a token side by side."""
    from pdrelay_connector.core.messages import Region

    (_, count, size) = memory.shape
    heads = HEADS // ranks
    head = size // heads
    return Region(
        memory.address + layer * count * size, count, heads, TOKENS, head // TOKENS, size, head, head // TOKENS,
        all_heads=HEADS, layer=f"layers.{number}",
    )  # fmt: skip


_speaking = threading.Lock()
_out = sys.stdout  # main() moves it: NIXL writes its log to stdout


def say(**said):
    with _speaking:
        print(json.dumps(said), flush=True, file=_out)


def main(name, port, block_bytes, mode, stages, ranks, device, timeout):
    global _out
    _out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # nixl's package asks torch for its CUDA version; without torch it takes what is installed, 5 s of CPU sooner.
    if device == HOST:
        sys.modules["torch"] = None
    layers = [*map(int, stages.split(","))]
    engine = Engine(name, int(port), int(block_bytes), mode, layers, int(ranks), device, float(timeout))
    for line in sys.stdin:
        order = json.loads(line)
        say(**getattr(engine, order.pop("do"))(**order))


if __name__ == "__main__":
    main(*sys.argv[1:])

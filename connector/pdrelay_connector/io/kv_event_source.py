"""The KV event batches that one rank publishes over ZMQ, in order, with replay of missed ones.

The only importer of ZMQ. vLLM's side is ``ZmqEventPublisher`` (``vllm/distributed/kv_events.py``):
a PUB socket, whose messages are topic, number (8 bytes, big endian) and batch, and a ROUTER socket,
which answers a number with the batches it still has from there on, and ends with number -1.
"""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.asyncio

from pdrelay_connector.core.kv_events.batch_sequence import GAP, BatchSequence
from pdrelay_connector.errors import Unreachable

HIGH_WATER_MARK = 100_000  # messages that wait in a socket, as vLLM's default
MAX_MESSAGE = 64 << 20  # bytes; ZMQ ends a connection on a longer one
FIRST_LOOK_S = 1.0  # a subscription that takes hold after the first replay may have missed batches
LOOK_EVERY_S = 5.0  # of silence: the last batch may be lost, and no later one shows it
REPLAY_SILENCE_S = 5.0  # the publisher looks for requests ten times a second, when it is idle
TURN = 64  # batches, after which others have a turn
_END = (-1).to_bytes(8, "big", signed=True)
_WILDCARDS = ("tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:", "tcp://:::")


@dataclass(frozen=True, slots=True)
class KVEventSource:
    """The endpoints of a rank, as from ``EngineClient.get_kv_event_sources``, with its number."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""

    @property
    def exposures(self) -> tuple[str, ...]:
        """Return the endpoints on the network: neither ZMQ nor vLLM requires a key there."""
        return tuple(
            endpoint
            for endpoint in self._endpoints
            if not endpoint.startswith(("ipc://", "inproc://"))
        )

    @property
    def open_directories(self) -> tuple[str, ...]:
        """Return the ipc:// endpoints that other users of this machine may reach or replace."""
        return tuple(
            endpoint
            for endpoint in self._endpoints
            if endpoint.startswith("ipc://") and not _is_private(endpoint[6:])
        )

    @property
    def _endpoints(self) -> tuple[str, ...]:
        return tuple(endpoint for endpoint in (self.endpoint, self.replay_endpoint) if endpoint)


def _is_private(address: str) -> bool:
    """Tell whether only this user, and root, may enter a directory on the way to a socket."""
    # An abstract name ("@...") has no directory. Links are followed: what they name may have
    # another way in.
    return not address.startswith("@") and any(map(_is_own, Path(address).resolve().parents))


def _is_own(folder: Path) -> bool:
    try:
        status = folder.stat()
    except OSError:
        return False
    return status.st_uid == os.geteuid() and not status.st_mode & 0o077


def reachable(endpoint: str) -> str:
    """Return the address to connect to for a bound endpoint: loopback for a wildcard."""
    for wildcard in _WILDCARDS:
        if endpoint.startswith(wildcard):
            return f"tcp://127.0.0.1:{endpoint.removeprefix(wildcard)}"
    return endpoint


async def follow(
    source: KVEventSource, publish: Callable[[bytes], None], forget: Callable[[], None]
) -> None:
    """Call ``publish`` with every batch in order, and ``forget`` after a gap, until cancelled.

    Raises :exc:`~pdrelay_connector.errors.Unreachable` if ZMQ refuses an endpoint.
    """
    context = zmq.asyncio.Context()
    try:
        with context.socket(zmq.SUB) as live:
            live.set(zmq.RCVHWM, HIGH_WATER_MARK)
            live.set(zmq.MAXMSGSIZE, MAX_MESSAGE)
            live.set(zmq.SUBSCRIBE, source.topic.encode())
            live.connect(reachable(source.endpoint))
            await _Follower(context, source, live, publish, forget).run()
    except zmq.ZMQError as exc:
        raise Unreachable(f"KV events at {source.endpoint}: {exc}") from exc
    finally:
        context.destroy(linger=0)


class _Follower:
    def __init__(
        self,
        context: zmq.asyncio.Context,
        source: KVEventSource,
        live: zmq.asyncio.Socket,
        publish: Callable[[bytes], None],
        forget: Callable[[], None],
    ) -> None:
        self._context = context
        self._source = source
        self._live = live
        self._publish = publish
        self._forget = forget
        self._sequence = BatchSequence()
        self._passed = 0  # batches, since others had a turn

    async def run(self) -> None:
        await self._replay(self._sequence.begin_replay())
        silence = FIRST_LOOK_S
        while True:
            if not await self._live.poll(int(silence * 1000)):
                await self._replay(self._sequence.begin_replay())
                silence = LOOK_EVERY_S
                continue
            frames = await self._live.recv_multipart()
            if len(frames) == 3 and len(frames[1]) == 8:
                self._sequence.live(int.from_bytes(frames[1], "big"), frames[2])
                await self._pass_on()
            while (start := self._sequence.missing()) is not None:
                await self._replay(start)

    async def _replay(self, start: int) -> None:
        """Ask for all batches from this one on; the answer may be cut short, or never come."""
        if self._source.replay_endpoint is not None:
            # A socket for each request: what is left of an earlier answer is no part of a later
            # one.
            with self._context.socket(zmq.DEALER) as dealer:
                dealer.set(zmq.LINGER, 0)
                dealer.set(zmq.RCVHWM, 0)  # ROUTER drops what does not fit
                dealer.set(zmq.MAXMSGSIZE, MAX_MESSAGE)
                dealer.connect(reachable(self._source.replay_endpoint))
                await dealer.send_multipart([b"", start.to_bytes(8, "big")])  # pyright: ignore[reportUnknownMemberType]
                while await dealer.poll(int(REPLAY_SILENCE_S * 1000)):
                    *_, number, payload = [b"", b"", *await dealer.recv_multipart()]
                    if number == _END or len(number) != 8:
                        break
                    self._sequence.replayed(int.from_bytes(number, "big"), payload)
                    await self._pass_on()
        self._sequence.end_replay()
        await self._pass_on()

    async def _pass_on(self) -> None:
        for step in self._sequence.take_steps():
            self._passed += 1
            if step is GAP:
                self._forget()
            else:
                self._publish(step)
            if self._passed % TURN == 0:
                await asyncio.sleep(0)

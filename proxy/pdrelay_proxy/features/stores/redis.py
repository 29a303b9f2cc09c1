"""A store in Redis: one hash. redis-py is imported here alone.

Every change is one script that returns the whole hash and raises a version, so that an older view
never replaces a newer one. A message on the channel announces a change; views are also read again
every few seconds, in case a message was lost.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import chain
from typing import Final, NamedTuple, Protocol, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from pdrelay_proxy.core.discovery.sources import MAX_ENGINES
from pdrelay_proxy.core.discovery.store_entries import MAX_ENTRY_BYTES
from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.features.stores.store_url import split_prefix
from pdrelay_proxy.io.discovery.store import StoreDown, StoreObserver

logger = logging.getLogger(__name__)
_KEYS: Final = ("instances", "epoch", "version")
_TIMEOUT_S: Final = 3.0
# ARGV: a new epoch, in case there is none; what to do; the channel; how the entry must be, for a
# change that depends on it; then name, text, name, text ... of the entries. Of an entry that is too
# long for an engine the beginning comes.
_SCRIPT: Final = f"""
redis.call('SET', KEYS[2], ARGV[1], 'NX')
local agrees = 1
if ARGV[2] == 'replace' or ARGV[2] == 'drop' then
  local now, wanted = redis.call('HGET', KEYS[1], ARGV[5]), ARGV[2] == 'replace' and ARGV[6]
  if now ~= ARGV[4] and now ~= wanted then agrees = 0
  elseif wanted then redis.call('HSET', KEYS[1], ARGV[5], wanted)
  else redis.call('HDEL', KEYS[1], ARGV[5]) end
end
for i = 5, #ARGV, 2 do
  if ARGV[2] == 'delete' then redis.call('HDEL', KEYS[1], ARGV[i]) end
  if ARGV[2] == 'restore' then redis.call('HSETNX', KEYS[1], ARGV[i], ARGV[i + 1]) end
  if ARGV[2] == 'put' then
    if redis.call('HLEN', KEYS[1]) >= {MAX_ENGINES} and redis.call('HEXISTS', KEYS[1], ARGV[i]) == 0 then
      return redis.error_reply('there are {MAX_ENGINES} engines already, which is as many as a router takes')
    end
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
  end
end
if ARGV[2] ~= 'read' and agrees == 1 then
  redis.call('INCR', KEYS[3])
  redis.call('PUBLISH', ARGV[3], '')
end
local entries = redis.call('HGETALL', KEYS[1])
for i = 2, #entries, 2 do
  if #entries[i] > {MAX_ENTRY_BYTES} then entries[i] = string.sub(entries[i], 1, {MAX_ENTRY_BYTES} + 1) end
end
return {{redis.call('GET', KEYS[2]), redis.call('GET', KEYS[3]) or '0', entries, agrees}}
"""

# KEYS: of the text. ARGV: as it was read, and what replaces it.
_REPLACE: Final = """
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return {0} end
redis.call('SET', KEYS[1], ARGV[2])
return {1}
"""
_READ: Final = "return {redis.call('GET', KEYS[1]) or ''}"


class _Answer(NamedTuple):
    """What the script returns: a view, and whether the entry is as the change wanted it."""

    epoch: str
    version: int
    entries: Mapping[str, str]
    agrees: bool


class _Subscription(Protocol):
    async def subscribe(self, channel: str, /) -> object: ...
    async def get_message(self, *, timeout: float) -> object: ...  # noqa: ASYNC109 (the library calls it so)


class _ConnectionPool(Protocol):
    def make_connection(self) -> object: ...


class _Client(Protocol):
    """As much of the library as is used, with types."""

    @property
    def connection_pool(self) -> _ConnectionPool: ...
    async def eval(self, script: str, keys: int, /, *args: str) -> list[object]: ...
    def pubsub(
        self, *, ignore_subscribe_messages: bool
    ) -> AbstractAsyncContextManager[_Subscription]: ...
    async def aclose(self) -> None: ...


class RedisStore:
    """``redis://[user@]host:port/db``, ``rediss://`` for TLS, ``unix://PATH``.

    ``?prefix=NAME`` keeps the engines apart from those of routers with another prefix.
    """

    def __init__(
        self,
        url: str,
        observer: StoreObserver,
        *,
        password: str | None = None,
        reread_s: float = 2.0,
    ) -> None:
        self._redis, tag = _connect(url, password)
        self._keys = [f"{tag}:{name}" for name in _KEYS]
        self._channel = f"{tag}:changed"
        self._observer = observer
        self._reread_s = reread_s
        self._seen = ("", -1)  # epoch and version of the view
        self._kept: Mapping[str, str] = {}  # the view
        self._trouble = ""  # what was logged last
        self._ends = False  # redis-py swallows a cancellation now and then

    async def put(self, name: str, text: str, /) -> None:
        """Keep an entry; raises StoreDown."""
        await self._change("put", name, text)

    async def delete(self, name: str, /) -> None:
        """Drop an entry; raises StoreDown."""
        await self._change("delete", name, "")

    async def replace(self, name: str, before: str, after: str | None, /) -> bool:
        """Write an entry anew, or drop it, if it is still as it was; raises StoreDown."""
        verb, text = ("drop", "") if after is None else ("replace", after)
        epoch = self._seen[0]
        is_done = await self._change(verb, name, text, before=before)
        # Redis had lost its entries, and has just got them back
        if not is_done and self._seen[0] != epoch:
            is_done = await self._change(verb, name, text, before=before)
        return is_done

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Subscribe to changes, and read again and again."""
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            self._ends = True
            task.cancel()
            await asyncio.wait((task,))
            await self._redis.aclose()

    async def _change(self, verb: str, name: str, text: str, *, before: str = "") -> bool:
        try:
            answer = await self._run_script(verb, name, text, before=before)
            await self._take_in(answer, is_change=True)
        except (RedisError, OSError, TimeoutError) as exc:
            raise StoreDown(f"Redis did not make the change: {exc}") from exc
        return answer.agrees

    async def _run_script(self, verb: str, *entries: str, before: str = "") -> _Answer:
        """Run the script."""
        arguments = (secrets.token_hex(8), verb, self._channel, before, *entries)
        epoch, version, flat, agrees = await self._redis.eval(
            _SCRIPT, len(self._keys), *self._keys, *arguments
        )
        texts = [str(text) for text in cast("Sequence[object]", flat)]
        view = dict(zip(texts[::2], texts[1::2], strict=True))
        number = str(version)
        if not (number.isascii() and number.isdigit()):
            raise RedisError(f"{self._keys[2]} is no number: remove it")
        return _Answer(str(epoch), int(number), view, agrees == 1)

    async def _take_in(
        self, answer: _Answer, *, is_first: bool = False, is_change: bool = False
    ) -> None:
        """Take in a view.

        A Redis that has lost its entries, or has older ones, first gets the latest view back.

        ``is_first``: the first view after a lost connection, so no later view can have come before
        it; ``is_change``: the answer to a change of this router, which waits until the observer has
        received it.
        """
        known, latest = self._seen
        epoch, version, entries, _ = answer
        if known and (epoch != known or (is_first and version < latest)):
            logger.warning("Redis has lost what it knew: %d engines are put back", len(self._kept))
            epoch, version, entries, _ = await self._run_script(
                "restore", *chain.from_iterable(self._kept.items())
            )
            self._seen = known, latest = (epoch, -1)
        if epoch != known or version > latest:
            self._seen = (epoch, version)
            self._kept = entries
        elif not is_change:
            self._observer.heard()
            return
        # also if a later view came first and the observer is still receiving it
        await self._observer.receive(self._kept)

    async def _run(self) -> None:
        while not self._ends:
            try:
                await self._listen()
            except (RedisError, OSError, TimeoutError) as exc:
                if str(exc) != self._trouble:
                    logger.warning("Redis: %s; the last view of it stays", exc)
                self._trouble = str(exc)
            except Exception:  # a bug must not end the updates for good
                logger.exception("the view of Redis could not be taken")
            await asyncio.sleep(0.2 + secrets.randbelow(300) / 1000)

    async def _listen(self) -> None:
        async with self._redis.pubsub(ignore_subscribe_messages=True) as subscription:
            await subscription.subscribe(self._channel)
            await self._take_in(await self._run_script("read"), is_first=True)
            while not self._ends:
                self._trouble = ""
                await subscription.get_message(timeout=self._reread_s)
                await self._take_in(await self._run_script("read"))


class RedisText:
    """A short text beside the engines (core/ports.py: SharedText)."""

    def __init__(self, url: str, name: str, *, password: str | None = None) -> None:
        """``url``: that of the store; ``name``: of the text."""
        self._redis, tag = _connect(url, password)
        self._key = f"{tag}:{name}"
        self._text = ""

    async def read(self) -> str:
        """Return the text; raises StoreDown."""
        try:
            (text,) = await self._redis.eval(_READ, 1, self._key)
        except (RedisError, OSError, TimeoutError) as exc:
            raise StoreDown(f"Redis did not answer: {exc}") from exc
        self._text = str(text)
        return self._text

    async def replace(self, text: str, /) -> bool:
        """Write the text, unless it has changed since it was read; raises StoreDown."""
        try:
            (done,) = await self._redis.eval(_REPLACE, 1, self._key, self._text, text)
        except (RedisError, OSError, TimeoutError) as exc:
            raise StoreDown(f"Redis did not make the change: {exc}") from exc
        if done == 1:
            self._text = text
        return done == 1

    async def aclose(self) -> None:
        """Close its connections."""
        await self._redis.aclose()


def _connect(url: str, password: str | None) -> tuple[_Client, str]:
    """Return a client, and the prefix of all keys: in braces, so that they hash to one slot of a
    Redis Cluster.

    Raises ConfigError: the URL is none of Redis.
    """
    limits = {"socket_timeout": _TIMEOUT_S, "socket_connect_timeout": _TIMEOUT_S}
    # Another program's entry need not be UTF-8: discovery leaves it out, and a restore writes the
    # same bytes.
    texts = {"decode_responses": True, "encoding_errors": "surrogateescape"}
    make = cast("Callable[..., _Client]", Redis.from_url)  # pyright: ignore[reportUnknownMemberType]
    url, prefix = split_prefix(url)
    tag = "{pdrelay:" + prefix + "}" if prefix else "{pdrelay}"
    try:
        client = make(url, password=password, **texts, **limits)
        client.connection_pool.make_connection()  # it is not opened; refuses names in the query
    except (TypeError, ValueError) as exc:
        raise ConfigError(
            f"store is {url}, which the library of Redis refuses: {exc}; write redis://host:port/0"
        ) from exc
    return client, tag

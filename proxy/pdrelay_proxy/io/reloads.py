"""Reads certificates and keys again when their files change, as cert-manager and Kubernetes renew
them.
"""

import asyncio
import logging
import ssl
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

from pdrelay_proxy.core.admission.admin_key import AdminKey
from pdrelay_proxy.core.admission.keys import Keyring, Outbound
from pdrelay_proxy.core.counters import Counters
from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.io.background import meanwhile, repeatedly
from pdrelay_proxy.io.files import (
    client_keys,
    engine_keys,
    join_key,
    of_admin_port,
    operator_key,
    renew_engine_tls,
    renew_server_tls,
)
from pdrelay_proxy.settings import Settings

logger = logging.getLogger(__name__)
# seconds between two checks of the files; the kubelet renews mounted ones once a minute
_EVERY_S: Final = 5.0
_Stamp: TypeAlias = tuple[int, int, int, bool] | None  # None: the file cannot be read
_SERVER: Final = ("tls_cert", "tls_key", "tls_client_ca")
_ENGINES: Final = ("engine_ca", "engine_cert", "engine_key")
_KEYS: Final = ("api_keys_file", "prefill_api_key_file", "decode_api_key_file")
_OPERATORS: Final = ("admin_key_file", "join_key_file")
# A key that is written in place is complete when its line ends; half a key must never be accepted.
_LINES: Final = frozenset({*_KEYS, *_OPERATORS})


@dataclass(slots=True)
class FileReloads:
    """Checks files in one task, for as long as the router serves.

    If a reload fails, the old content stays in use.
    """

    settings: Callable[[], Settings]  # the present ones
    server_tls: ssl.SSLContext | None
    engine_tls: ssl.SSLContext
    keyring: Keyring
    outbound: Outbound
    admin_key: AdminKey
    counters: Counters
    admin_tls: ssl.SSLContext | None = None
    join_key: AdminKey = field(default_factory=AdminKey)
    # by setting
    _seen: Mapping[str, tuple[str, _Stamp]] = field(default_factory=dict[str, tuple[str, _Stamp]])
    _held: frozenset[str] = frozenset()  # settings whose files changed and may be half written

    def __post_init__(self) -> None:
        self._seen = stamps_of(self.settings())

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Check regularly while the block lasts."""
        async with meanwhile(
            repeatedly(
                _EVERY_S, self.check_files, logger, "the files of certificates could not be seen"
            )
        ):
            yield

    async def check_files(self) -> None:
        """Read again what has changed; a file system that hangs does not stop the router."""
        settings = self.settings()
        now = await asyncio.to_thread(stamps_of, settings)
        if settings is not self.settings():
            return  # SIGHUP has read others meanwhile: those are looked at next
        # also a file that a setting names since SIGHUP: it may have been written after that
        changed = {name for name, seen in now.items() if seen != self._seen.get(name)}
        self._seen = now
        half = {name for name in changed & _LINES if not _ends_with_line(now[name][1])}
        for name in sorted(half):
            text = (
                "%s changed, and its last line has no line break, so it may be half written: read "
                "again in %g s"
            )
            logger.warning(text, name, _EVERY_S)
        due = changed | self._held
        self._held = frozenset()
        for group, renew in (
            (_SERVER, self._renew_server),
            (_ENGINES, self._renew_engines),
            (_KEYS, self._renew_keys),
            (_OPERATORS, self._renew_operator_keys),
        ):
            concerned = [name for name in group if name in due]
            if not half.isdisjoint(concerned):
                self._held |= frozenset(concerned)
            elif concerned:
                self._reload(concerned, renew, settings)

    def _reload(
        self, names: list[str], renew: Callable[[Settings], None], settings: Settings
    ) -> None:
        try:
            renew(settings)
        except ConfigError as exc:
            self.counters.file_reloads["failed",] += 1
            logger.warning(
                "%s changed and cannot be used, so what was read before stays: %s",
                ", ".join(names),
                exc,
            )
            return
        self.counters.file_reloads["ok",] += 1
        logger.info("%s changed and was read again", ", ".join(names))

    def _renew_server(self, settings: Settings) -> None:
        if self.server_tls is not None:
            renew_server_tls(self.server_tls, settings)
        if self.admin_tls is not None:
            renew_server_tls(self.admin_tls, of_admin_port(settings))

    def _renew_engines(self, settings: Settings) -> None:
        renew_engine_tls(self.engine_tls, settings)

    def _renew_keys(self, settings: Settings) -> None:
        client = client_keys(settings)
        engine = engine_keys(settings)
        self._check_unchanged(settings, _KEYS)
        self.keyring.keys = client
        self.outbound.change(engine)

    def _renew_operator_keys(self, settings: Settings) -> None:
        admin = operator_key(settings)
        join = join_key(settings)
        self._check_unchanged(settings, _OPERATORS)
        self.admin_key.change(admin)
        self.join_key.change(join)

    def _check_unchanged(self, settings: Settings, names: tuple[str, ...]) -> None:
        """Raise ConfigError if a file was written meanwhile: the next check reads it again."""
        now = stamps_of(settings)
        if any(now.get(name) != self._seen.get(name) for name in names):
            raise ConfigError("it was written meanwhile")


def stamps_of(settings: Settings) -> Mapping[str, tuple[str, _Stamp]]:
    """Return for each file of the settings a stamp that changes when it is replaced, also behind a
    symbolic link.
    """
    return _stamps(settings, (*_SERVER, *_ENGINES, *_KEYS, *_OPERATORS))


def key_stamps(settings: Settings) -> Mapping[str, tuple[str, _Stamp]]:
    """Return the stamps of the files of keys alone."""
    return _stamps(settings, (*_KEYS, *_OPERATORS))


def half_written(settings: Settings, stamps: Mapping[str, tuple[str, _Stamp]]) -> frozenset[str]:
    """Return settings whose key files are incomplete, or have changed since these stamps."""
    now = key_stamps(settings)
    return frozenset(
        name
        for name, (path, stamp) in now.items()
        if stamps.get(name) != (path, stamp) or not _ends_with_line(stamp)
    )


def _stamps(settings: Settings, names: tuple[str, ...]) -> Mapping[str, tuple[str, _Stamp]]:
    paths: dict[str, str | None] = {name: getattr(settings, name) for name in names}
    return {
        name: (path, _stamp(path, name in _LINES))
        for name, path in paths.items()
        if path is not None
    }


def _stamp(path: str, has_lines: bool) -> _Stamp:  # noqa: FBT001 (of one caller)
    try:
        stat = Path(path).stat()
        is_whole = not has_lines or Path(path).read_bytes()[-1:] == b"\n"
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size, is_whole


def _ends_with_line(stamp: _Stamp) -> bool:
    return stamp is None or stamp[3]

"""The Kubernetes API, as far as the router needs it: list, watch, patch one key. httpx stops at
this file.
"""

import asyncio
import os
import ssl
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Final, Self

import anyio
import httpx

from pdrelay_proxy.core.http.bounded_body import whole
from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.io.files import read_text

ACCOUNT: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
# of one answer, and of one event: 200 pods have some megabytes
_MOST_BYTES: Final = 64 * 1024 * 1024
_SAID: Final = 300  # characters of an answer that an error repeats


class KubeError(Exception):
    """The API did not do what it was asked for; the message says how.

    ``retry_after_s``: as it wishes.
    """

    def __init__(
        self, message: str, *, status: int | None = None, retry_after_s: float = 0.0
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class Expired(KubeError):
    """What was to be continued is too old: list anew."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where the API is, and who we are there."""

    url: str
    namespace: str
    token_file: str | None = None  # read anew for each request: Kubernetes renews it every hour
    ca_file: str | None = None

    @classmethod
    def around(cls, namespace: str | None = None, environ: Mapping[str, str] = os.environ) -> Self:
        """Find this pod's cluster; ``PDRELAY_SERVICE_ACCOUNT``: another folder.

        Raises ConfigError: there is none.
        """
        folder = environ.get("PDRELAY_SERVICE_ACCOUNT", ACCOUNT)
        host = environ.get("KUBERNETES_SERVICE_HOST")
        port = environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise ConfigError(
                "this is no pod (KUBERNETES_SERVICE_HOST is not set): leave out what needs "
                "Kubernetes"
            )
        read_text(f"{folder}/token")
        shown = f"[{host}]" if ":" in host else host
        where = namespace or read_text(f"{folder}/namespace").strip()
        return cls(f"https://{shown}:{port}", where, f"{folder}/token", f"{folder}/ca.crt")

    def tls(self) -> ssl.SSLContext | bool:
        """Build what the API's certificate is checked with; raises ConfigError."""
        if self.ca_file is None:
            return True
        read_text(self.ca_file)
        try:
            return ssl.create_default_context(cafile=self.ca_file)
        except ssl.SSLError as exc:
            raise ConfigError(f"{self.ca_file} has no certificates of authorities in PEM") from exc


class Kubernetes:
    """A client. Use it as a context manager; every method raises KubeError."""

    def __init__(self, cluster: Cluster, *, timeout_s: float = 30.0) -> None:
        self.namespace = cluster.namespace
        self._cluster = cluster
        self._timeout_s = timeout_s  # for a whole answer; not for a watch
        self._client = httpx.AsyncClient(
            base_url=cluster.url,
            verify=cluster.tls(),
            timeout=timeout_s,
            trust_env=False,
            headers={"user-agent": "pdrelay"},
        )

    async def __aenter__(self) -> Self:
        # loads what httpx would load with the first request: nobody waits for it yet
        anyio.get_cancelled_exc_class()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def get(self, path: str, query: Mapping[str, str]) -> bytes:
        """Return an answer as a whole."""
        return await self._asked("GET", path, query)

    async def merge_patch(self, path: str, body: bytes) -> bytes:
        """Change an object by a JSON merge patch, and return the whole object as it is then."""
        kind = {"content-type": "application/merge-patch+json"}
        return await self._asked("PATCH", path, {}, content=body, headers=kind)

    async def json_patch(self, path: str, body: bytes) -> bytes:
        """Change an object by a JSON patch (RFC 6902), and return the whole object; status 422: its
        test has failed.
        """
        return await self._asked(
            "PATCH", path, {}, content=body, headers={"content-type": "application/json-patch+json"}
        )

    async def watch(
        self, path: str, query: Mapping[str, str], *, silence_s: float
    ) -> AsyncGenerator[list[bytes]]:
        """Yield the lines of an answer as they come, several at a time; KubeError also if nothing
        comes for so long.
        """
        timeout = httpx.Timeout(self._timeout_s, read=silence_s)
        rest = b""
        with _telling(path):
            async with self._client.stream(
                "GET", path, params=dict(query), headers=self._headers(), timeout=timeout
            ) as response:
                if response.status_code != HTTPStatus.OK:
                    raise _refusal(path, response, await response.aread())
                async for part in response.aiter_bytes():
                    *lines, rest = (rest + part).split(b"\n")
                    if found := [line for line in lines if line]:
                        yield found
                    if len(rest) > _MOST_BYTES:
                        raise KubeError(f"{path} sends an event without end")
        if rest:
            raise KubeError(f"{path} broke off in the middle of an event")

    async def _asked(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        *,
        content: bytes = b"",
        headers: Mapping[str, str] = {},
    ) -> bytes:
        headers = {**self._headers(), **headers}
        try:
            with _telling(path):
                async with (
                    asyncio.timeout(self._timeout_s),
                    self._client.stream(
                        method, path, params=dict(query), content=content, headers=headers
                    ) as response,
                ):
                    too_long = KubeError(f"{path} is answered without end")
                    body = await whole(response.aiter_bytes(), _MOST_BYTES, too_long)
        except TimeoutError as exc:
            raise KubeError(f"{path} is not answered within {self._timeout_s:g} s") from exc
        if response.status_code != HTTPStatus.OK:
            raise _refusal(path, response, body)
        return body

    def _headers(self) -> dict[str, str]:
        if self._cluster.token_file is None:
            return {}
        try:
            token = Path(self._cluster.token_file).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as exc:
            raise KubeError(
                f"{self._cluster.token_file} cannot be read: the API would not know us"
            ) from exc
        return {"authorization": f"Bearer {token}"}


@contextmanager
def _telling(path: str) -> Generator[None]:
    """Raise what httpx raises as KubeError."""
    try:
        yield
    except httpx.TimeoutException as exc:
        raise KubeError(f"{path}: nothing came in time ({type(exc).__name__})") from exc
    except httpx.HTTPError as exc:
        raise KubeError(f"{path}: {type(exc).__name__} {exc}".rstrip()) from exc


def _refusal(path: str, response: httpx.Response, body: bytes) -> KubeError:
    status = response.status_code
    said = body[:_SAID].decode(errors="replace").strip()
    kind = Expired if status == HTTPStatus.GONE else KubeError
    wish = response.headers.get("retry-after", "")
    after = min(float(wish), 60.0) if wish.isascii() and wish.isdigit() else 0.0
    return kind(
        f"{path} is answered with status {status}: {said}", status=status, retry_after_s=after
    )

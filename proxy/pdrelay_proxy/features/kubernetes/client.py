"""A client of the Kubernetes API: list, watch, patch one object. httpx is imported here alone."""

import asyncio
import os
import re
import ssl
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Final, Self

import anyio
import httpx

from pdrelay_proxy.core.http.bounded_body import read_bounded
from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.io.files import read_text

ACCOUNT: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
# of one answer, or of one event: 200 pods take some megabytes
_MAX_BYTES: Final = 64 * 1024 * 1024
_ERROR_CHARS: Final = 300  # of an answer that an error message quotes
_TOKEN: Final = re.compile(r"[!-~]+")


class KubeError(Exception):
    """The API refused or failed; the message says how.

    ``retry_after_s``: the API's Retry-After, in seconds.
    """

    def __init__(
        self, message: str, *, status: int | None = None, retry_after_s: float = 0.0
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class Expired(KubeError):
    """The API no longer has the version to continue from (410 Gone): list anew."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The address of the API, and the router's credentials there."""

    url: str
    namespace: str
    token_file: str | None = None  # read anew for each request: Kubernetes renews it every hour
    ca_file: str | None = None

    @classmethod
    def around(cls, namespace: str | None = None, environ: Mapping[str, str] = os.environ) -> Self:
        """Find this pod's cluster; ``PDRELAY_SERVICE_ACCOUNT`` names another folder.

        Raises ConfigError: this is no pod.
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
        bracketed_host = f"[{host}]" if ":" in host else host
        own_namespace = namespace or read_text(f"{folder}/namespace").strip()
        return cls(
            f"https://{bracketed_host}:{port}", own_namespace, f"{folder}/token", f"{folder}/ca.crt"
        )

    def tls(self) -> ssl.SSLContext | bool:
        """Build the TLS context that checks the API's certificate; raises ConfigError."""
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
        self._timeout_s = timeout_s  # for a whole answer; a watch has none
        self._client = httpx.AsyncClient(
            base_url=cluster.url,
            verify=cluster.tls(),
            timeout=timeout_s,
            trust_env=False,
            headers={"user-agent": "pdrelay"},
        )

    async def __aenter__(self) -> Self:
        # httpx loads this with its first request: load it now, when no request waits
        anyio.get_cancelled_exc_class()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def get(self, path: str, query: Mapping[str, str]) -> bytes:
        """Return a whole answer."""
        return await self._request("GET", path, query)

    async def merge_patch(self, path: str, body: bytes) -> bytes:
        """Change an object by a JSON merge patch (RFC 7396); return the whole object after it."""
        headers = {"content-type": "application/merge-patch+json"}
        return await self._request("PATCH", path, {}, content=body, headers=headers)

    async def json_patch(self, path: str, body: bytes) -> bytes:
        """Change an object by a JSON patch (RFC 6902); return the whole object after it.

        KubeError with status 422: a `test` operation of the patch failed.
        """
        return await self._request(
            "PATCH", path, {}, content=body, headers={"content-type": "application/json-patch+json"}
        )

    async def watch(
        self, path: str, query: Mapping[str, str], *, silence_s: float
    ) -> AsyncGenerator[list[bytes]]:
        """Yield the lines of an answer as they come, several at a time.

        Raises KubeError also if nothing comes for ``silence_s`` seconds.
        """
        timeout = httpx.Timeout(self._timeout_s, read=silence_s)
        rest = bytearray()
        with _kube_errors(path):
            async with self._client.stream(
                "GET", path, params=dict(query), headers=self._headers(), timeout=timeout
            ) as response:
                if response.status_code != HTTPStatus.OK:
                    raise _refusal(path, response, await _beginning(response))
                async for part in response.aiter_bytes():
                    rest += part
                    if b"\n" in part:
                        *lines, end = bytes(rest).split(b"\n")
                        rest = bytearray(end)
                        if events := [line for line in lines if line]:
                            yield events
                    if len(rest) > _MAX_BYTES:
                        raise KubeError(f"{path} sends an event without end")
        if rest:
            raise KubeError(f"{path} broke off in the middle of an event")

    async def _request(
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
            with _kube_errors(path):
                async with (
                    asyncio.timeout(self._timeout_s),
                    self._client.stream(
                        method, path, params=dict(query), content=content, headers=headers
                    ) as response,
                ):
                    too_long = KubeError(f"{path} is answered without end")
                    body = await read_bounded(response.aiter_bytes(), _MAX_BYTES, too_long)
        except TimeoutError as exc:
            raise KubeError(f"{path} is not answered within {self._timeout_s:g} s") from exc
        if response.status_code != HTTPStatus.OK:
            raise _refusal(path, response, body)
        return body

    def _headers(self) -> dict[str, str]:
        if self._cluster.token_file is None:
            return {}
        file = self._cluster.token_file
        try:
            token = Path(file).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as exc:
            raise KubeError(f"{file} cannot be read: the API would not know us") from exc
        if not _TOKEN.fullmatch(token):  # h11 would refuse the header, and quote it
            raise KubeError(f"{file} is no token: it must be one word of printable ASCII")
        return {"authorization": f"Bearer {token}"}


@contextmanager
def _kube_errors(path: str) -> Generator[None]:
    """Raise httpx's errors as KubeError."""
    try:
        yield
    except httpx.TimeoutException as exc:
        raise KubeError(f"{path}: nothing came in time ({type(exc).__name__})") from exc
    except httpx.HTTPError as exc:
        raise KubeError(f"{path}: {type(exc).__name__} {exc}".rstrip()) from exc


async def _beginning(response: httpx.Response) -> bytes:
    """Return as much of an answer as an error message quotes."""
    body = b""
    async for part in response.aiter_bytes():
        body += part
        if len(body) >= _ERROR_CHARS:
            break
    return body


def _refusal(path: str, response: httpx.Response, body: bytes) -> KubeError:
    status = response.status_code
    text = body[:_ERROR_CHARS].decode(errors="replace").strip()
    error_type = Expired if status == HTTPStatus.GONE else KubeError
    retry_after = response.headers.get("retry-after", "")
    after = (
        min(float(retry_after), 60.0) if retry_after.isascii() and retry_after.isdigit() else 0.0
    )
    return error_type(
        f"{path} is answered with status {status}: {text}", status=status, retry_after_s=after
    )

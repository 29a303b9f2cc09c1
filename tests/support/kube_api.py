"""A Kubernetes API of its own for tests: real sockets, the verbs the router uses, and every way a watch can fail."""

import asyncio
import copy
import json
import ssl
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlsplit

from support.cluster import free_ports

KINDS = {"pods": "Pod", "configmaps": "ConfigMap", "inferencepools": "InferencePool", "leases": "Lease"}
GROUPS = {"inferencepools": "inference.networking.k8s.io/v1", "leases": "coordination.k8s.io/v1"}  # the others are v1
Object = dict[str, object]
Event = tuple[str, Object]  # ADDED, MODIFIED or DELETED, and the object


class Refusal(Exception):
    """An answer other than 200."""

    def __init__(self, code: int, reason: str, **headers: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.headers = headers

    def status(self) -> Object:
        said = {"status": "Failure", "code": self.code, "reason": self.reason, "message": self.reason}
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, **said}


@dataclass
class Faults:
    """What goes wrong from now on; what is a deque goes wrong once for each entry."""

    refusals: deque[Refusal] = field(default_factory=deque)  # the next requests, whatever they ask
    watch_refusals: deque[Refusal] = field(default_factory=deque)  # the next watches, as an HTTP status
    watch_errors: deque[Refusal] = field(default_factory=deque)  # the next watches: an ERROR event in place of the next
    events: Callable[[Sequence[Event]], Sequence[Event]] = lambda events: events  # drops, doubles or reorders them
    hangs: bool = False  # watches say nothing more, and stay open
    cuts: bool = False  # watches end in the middle of the next event
    slow_list_s: float = 0.0
    held_patches: deque[asyncio.Event] = field(default_factory=deque)  # the next are made, and answered after these
    lost_answers: int = 0  # so many of the next patches are made, and the connection ends without a word
    expires_pages: int = 0  # so many continue tokens are too old


@dataclass(frozen=True)
class Call:
    """One request; ``name``: of the object, or the one its field selector names."""

    verb: str
    resource: str
    name: str
    namespace: str = ""
    selector: str = ""


@dataclass
class Request:
    """As it came."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes
    reader: asyncio.StreamReader  # at its end when the client has left


class KubeApi:
    """Use it as an async context manager; objects are changed by ``put`` and ``delete``, as a controller would."""

    def __init__(self, *, token: str | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.token = token
        self.faults = Faults()
        self.calls: list[Call] = []
        self.objects: dict[tuple[str, str, str], Object] = {}
        self.version = 1000
        self.watches = 0  # that are open
        self.bookmark_s = 0.1
        self._tls = tls
        self._history: list[tuple[int, str, str, Object]] = []  # version, type, resource, object
        self._compacted = 0  # versions below are gone
        self._changed = asyncio.Event()
        self._pages: dict[str, tuple[int, list[Object]]] = {}
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "KubeApi":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, port: int = 0) -> None:
        self.port = port or free_ports(1)[0]  # nobody takes it while this one is away
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self._tls)

    async def stop(self) -> None:
        """Go away, and with it all connections; ``start(port)`` brings it back with what it knows."""
        assert self._server is not None
        self._server.close()
        for task in (tasks := tuple(self._open)):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        return f"{'http' if self._tls is None else 'https'}://127.0.0.1:{self.port}"

    # What controllers do.

    def put(self, resource: str, name: str, body: Object, namespace: str = "default") -> Object:
        """Create or replace an object; a new one gets a uid."""
        old = self.objects.get((resource, namespace, name))
        key = (resource, namespace, name)
        new = copy.deepcopy(body)
        self.version += 1
        meta = new.setdefault("metadata", {})
        uid = old["metadata"]["uid"] if old else f"uid-{self.version}"
        meta.update(name=name, namespace=namespace, resourceVersion=str(self.version))
        meta.setdefault("uid", uid)
        new.update(kind=KINDS[resource], apiVersion=GROUPS.get(resource, "v1"))
        self.objects[key] = new
        self._log("MODIFIED" if old else "ADDED", resource, new)
        return new

    def delete(self, resource: str, name: str, namespace: str = "default") -> None:
        gone = copy.deepcopy(self.objects.pop((resource, namespace, name)))
        self.version += 1
        gone["metadata"]["resourceVersion"] = str(self.version)
        self._log("DELETED", resource, gone)

    def compact(self) -> None:
        """Forget the history: whoever wants to go on from an old version gets 410."""
        self.version += 1
        self._history = []
        self._compacted = self.version

    def _log(self, kind: str, resource: str, body: Object) -> None:
        self._history.append((self.version, kind, resource, body))
        self._changed.set()
        self._changed = asyncio.Event()

    # HTTP.

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            while (request := await _read(reader)) is not None:
                try:
                    await self._answer(request, writer)
                except Refusal as refusal:
                    _write(writer, refusal.code, refusal.status(), refusal.headers)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client has left, or we do
        finally:
            self._open.discard(task)
            writer.transport.abort()

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> None:
        if (static := _static(request.path)) is not None:
            return _write(writer, 200, static)
        resource, namespace, name = _target(request.path)
        verb = _verb(request, name)
        selected = dict(_selector(request.query.get("fieldSelector", ""))).get("metadata.name", name)
        self.calls.append(Call(verb, resource, selected, namespace, request.query.get("labelSelector", "")))
        if self.token is not None and request.headers.get("authorization") != f"Bearer {self.token}":
            raise Refusal(401, "Unauthorized")
        if self.faults.refusals:
            raise self.faults.refusals.popleft()
        match verb:
            case "list":
                found = copy.deepcopy(self._list(request, resource, namespace))
                end = time.monotonic() + self.faults.slow_list_s
                while time.monotonic() < end and self.faults.slow_list_s:  # by then it may be old
                    await asyncio.sleep(0.02)
                _write(writer, 200, found)
            case "watch":
                await self._watch(request, resource, namespace, writer)
            case "get":
                _write(writer, 200, self._one(resource, namespace, name))
            case "patch":
                found = copy.deepcopy(self._patch(request, resource, namespace, name))
                await self._hold_patch()
                _write(writer, 200, found)
            case _:
                raise Refusal(405, "MethodNotAllowed")
        return None

    async def _hold_patch(self) -> None:
        if self.faults.lost_answers:
            self.faults.lost_answers -= 1
            raise ConnectionResetError
        if self.faults.held_patches:
            await self.faults.held_patches.popleft().wait()

    def _one(self, resource: str, namespace: str, name: str) -> Object:
        if (found := self.objects.get((resource, namespace, name))) is None:
            raise Refusal(404, "NotFound")
        return found

    def _list(self, request: Request, resource: str, namespace: str) -> Object:
        if token := request.query.get("continue"):
            if self.faults.expires_pages:
                self.faults.expires_pages -= 1
                raise Refusal(410, "Expired")
            version, left = self._pages.pop(token)
        else:
            version = self.version
            matches = _matcher(request)
            found = [body for (kind, space, _), body in self.objects.items() if (kind, space) == (resource, namespace)]
            left = [copy.deepcopy(body) for body in found if matches(body)]
        limit = int(request.query.get("limit", "0")) or len(left) or 1
        meta: Object = {"resourceVersion": str(version)}
        if left[limit:]:
            meta["continue"] = f"page-{len(self.calls)}"
            self._pages[meta["continue"]] = (version, left[limit:])
        return {"kind": KINDS[resource] + "List", "apiVersion": "v1", "metadata": meta, "items": left[:limit]}

    def _patch(self, request: Request, resource: str, namespace: str, name: str) -> Object:
        old = self._one(resource, namespace, name)
        patch = json.loads(request.body)
        if (kind := request.headers.get("content-type")) == "application/json-patch+json":
            return self.put(resource, name, _patched(old, patch), namespace)
        if kind != "application/merge-patch+json":
            raise Refusal(415, "UnsupportedMediaType")
        wanted = patch.get("metadata", {}).get("resourceVersion")
        if wanted not in (None, old["metadata"]["resourceVersion"]):
            raise Refusal(409, "Conflict")
        new = _merged(old, patch)
        if len(json.dumps(new.get("data", {}))) > 1024 * 1024:
            raise Refusal(422, "Invalid: Too long: must have at most 1048576 bytes")
        return old if new == old else self.put(resource, name, new, namespace)

    # WATCH.

    async def _watch(self, request: Request, resource: str, namespace: str, writer: asyncio.StreamWriter) -> None:
        if self.faults.watch_refusals:
            raise self.faults.watch_refusals.popleft()
        since = int(request.query.get("resourceVersion") or self.version)
        if since < self._compacted:
            raise Refusal(410, "Expired: too old resource version")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
        self.watches += 1
        try:
            await self._stream(request, (resource, namespace), since, writer)
        finally:
            self.watches -= 1
        _chunk(writer, b"")

    async def _stream(self, request: Request, where: tuple[str, str], since: int, writer: asyncio.StreamWriter) -> None:
        """Write events until the time is over, or a fault ends it."""
        loop = asyncio.get_running_loop()
        matches = _matcher(request)
        seen = {}
        end = loop.time() + float(request.query.get("timeoutSeconds", "3600"))
        for version, kind, resource, body in self._history:  # which of the objects the client can know of
            if version <= since and resource == where[0] and matches(body):
                seen[body["metadata"]["uid"]] = kind != "DELETED"
        while loop.time() < end and not request.reader.at_eof():
            changed = self._changed
            if self.faults.hangs:
                await asyncio.sleep(0.02)
                continue
            if self.faults.watch_errors:
                _event(writer, "ERROR", self.faults.watch_errors.popleft().status())
                return
            fresh = [item for item in self._history if item[0] > since]
            since = max([since, self._compacted, *(item[0] for item in fresh)])
            events = [event for item in fresh if item[2] == where[0] for event in _seen(item, matches, where[1], seen)]
            await self._send(self.faults.events(events), writer)
            if not fresh:
                bookmark = {"kind": KINDS[where[0]], "metadata": {"resourceVersion": str(since)}}
                _event(writer, "BOOKMARK", bookmark)
                await writer.drain()
                await _either(changed, min(self.bookmark_s, max(0.0, end - loop.time())))

    async def _send(self, events: Sequence[Event], writer: asyncio.StreamWriter) -> None:
        for kind, body in events:
            if self.faults.cuts:
                line = json.dumps({"type": kind, "object": body}).encode()
                writer.write(f"{len(line):x}\r\n".encode() + line[: len(line) // 2])
                await writer.drain()
                raise ConnectionResetError
            _event(writer, kind, body)
        await writer.drain()


async def _either(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass


def _seen(item, matches, namespace: str, seen: dict[str, bool]) -> list[Event]:
    """Turn a change into what a watch with a selector sees of it."""
    _, kind, _, body = item
    uid = body["metadata"]["uid"]
    was = seen.get(body["metadata"]["uid"], False)
    if body["metadata"]["namespace"] != namespace:
        return []
    now = kind != "DELETED" and matches(body)
    seen[uid] = now
    if kind == "DELETED":
        return [("DELETED", body)] if was or matches(body) else []
    if now:
        return [("MODIFIED" if was or kind == "MODIFIED" else "ADDED", body)]
    return [("DELETED", body)] if was else []


async def _read(reader: asyncio.StreamReader) -> Request | None:
    line = await reader.readline()
    if not line:
        return None
    method, target, _ = line.decode().split(" ")
    headers = {}
    while (line := (await reader.readline()).strip()) != b"":
        name, _, value = line.decode().partition(":")
        headers[name.lower()] = value.strip()
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    parts = urlsplit(target)
    return Request(method, unquote(parts.path), dict(parse_qsl(parts.query)), headers, body, reader)


def _write(writer: asyncio.StreamWriter, code: int, body: Object, headers: dict[str, str] | None = None) -> None:
    raw = json.dumps(body).encode()
    extra = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in (headers or {}).items())
    head = f"HTTP/1.1 {code} X\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n{extra}\r\n"
    writer.write(head.encode() + raw)


def _event(writer: asyncio.StreamWriter, kind: str, body: Object) -> None:
    _chunk(writer, json.dumps({"type": kind, "object": body}).encode() + b"\n")


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def _target(path: str) -> tuple[str, str, str]:
    """Return resource, namespace and name."""
    group, _, rest = path.strip("/").removeprefix("apis/").removeprefix("api/").partition("/namespaces/")
    namespace, resource, name, *more = [*rest.split("/"), "", ""]
    if resource not in KINDS or any(more) or GROUPS.get(resource, "v1") != group:
        raise Refusal(404, "NotFound")
    return resource, namespace, name


def _verb(request: Request, name: str) -> str:
    if request.method == "GET" and not name:
        return "watch" if request.query.get("watch") in ("true", "1") else "list"
    return {"GET": "get", "PUT": "update", "POST": "create"}.get(request.method, request.method.lower())


def _matcher(request: Request) -> Callable[[Object], bool]:
    labels = _selector(request.query.get("labelSelector", ""))
    fields = request.query.get("fieldSelector", "")
    names = [value for key, value in _selector(fields) if key == "metadata.name"]

    def matches(body: Object) -> bool:
        has = body["metadata"].get("labels", {})
        found = all(key in has if value is None else has.get(key) == value for key, value in labels)
        return found and all(body["metadata"]["name"] == name for name in names)

    return matches


def _selector(text: str) -> list[tuple[str, str | None]]:
    """Read ``a=b,c`` (equality and existence)."""
    parts = [part.replace("==", "=").partition("=") for part in text.split(",") if part]
    return [(key, value if mark else None) for key, mark, value in parts]


def _patched(body: Object, steps: list[Object]) -> Object:
    """Carry out a JSON patch (RFC 6902) of what is in ``data``."""
    found = copy.deepcopy(body)
    data = found.setdefault("data", {})
    for step in steps:
        key = step["path"].removeprefix("/data/")
        if key not in data or (step["op"] == "test" and data[key] != step["value"]):
            raise Refusal(422, "the server rejected our request due to an error in our request")
        if step["op"] == "remove":
            del data[key]
        elif step["op"] == "replace":
            data[key] = step["value"]
    return found


def _merged(old: object, patch: object) -> object:
    """RFC 7396."""
    if not isinstance(patch, dict):
        return patch
    new = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            new.pop(key, None)
        else:
            new[key] = _merged(new.get(key), value)
    return new


def _static(path: str) -> Object | None:
    """Answer what kubectl asks first."""
    verbs = ["get", "list", "watch", "patch"]
    core = {name: kind for name, kind in KINDS.items() if name not in GROUPS}
    listed = [{"name": name, "kind": kind, "namespaced": True, "verbs": verbs} for name, kind in core.items()]
    for one in listed:
        one["singularName"] = ""
    return {
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
        "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": listed},
    }.get(path.rstrip("/"))


def pool(labels: dict[str, str], *ports: int, **spec: object) -> Object:
    """Describe an InferencePool (its status, which controllers write, is left out)."""
    picker = {"name": "picker", "port": {"number": 9002}}  # which the first CRDs of v1 demand
    ports_of = [{"number": port} for port in ports]
    return {"spec": {"selector": {"matchLabels": labels}, "targetPorts": ports_of, "endpointPickerRef": picker, **spec}}


def pod(
    ip: str | None = "10.0.0.1",
    role: str | None = "prefill",
    *,
    port: int | None = 8000,
    ready: bool = True,
    **more: object,
) -> Object:
    """Describe a pod. ``more``: labels (without pdrelay/), and ``annotations``, ``deleted``, ``phase``, ``worker``."""
    deleted = more.pop("deleted", None)
    phase = more.pop("phase", "Running")
    worker = more.pop("worker", None)
    meta: Object = {"annotations": more.pop("annotations", {})}
    labels = {
        "app": "pdrelay",
        **({"pdrelay/role": role} if role else {}),
        **{f"pdrelay/{k}": v for k, v in more.items()},
    }
    if worker is not None:
        labels["leaderworkerset.sigs.k8s.io/worker-index"] = str(worker)
    if deleted:
        meta["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    ports = [{"name": "side", "containerPort": 5600}, *([{"name": "http", "containerPort": port}] if port else [])]
    status = {"phase": phase, "conditions": [{"type": "Ready", "status": str(ready)}], **({"podIP": ip} if ip else {})}
    spec = {"containers": [{"name": "vllm", "ports": ports}]}
    return {"metadata": {**meta, "labels": labels}, "spec": spec, "status": status}

"""Parses a pod of the Kubernetes API into an engine."""

from enum import StrEnum
from typing import Final

import msgspec

from pdrelay_proxy.core.discovery.kubernetes_objects import Meta
from pdrelay_proxy.core.fleet.target import REVISION, Target, Wanted
from pdrelay_proxy.core.model import EngineRole, Role
from pdrelay_proxy.core.raw_json import NotJson, decode
from pdrelay_proxy.errors import AddressError

WORKER_INDEX: Final = "leaderworkerset.sigs.k8s.io/worker-index"
PORT_NAME: Final = "http"


class Mark(StrEnum):
    """Labels of a pod; all but the role may also be annotations, which win."""

    ROLE = "pdrelay/role"
    REVISION = "pdrelay/revision"
    SLICE = "pdrelay/slice"
    PORT = "pdrelay/port"
    RANKS = "pdrelay/ranks"
    MODE = "pdrelay/mode"
    SCHEME = "pdrelay/scheme"
    MOVE = "pdrelay/move"


class _Port(msgspec.Struct, rename="camel"):
    container_port: int
    name: str = ""


class _Container(msgspec.Struct):
    ports: list[_Port] | None = None


class _Spec(msgspec.Struct):
    containers: list[_Container] = []


class _Condition(msgspec.Struct):
    type: str
    status: str


class _Status(msgspec.Struct):
    phase: str = ""
    ip: str | None = msgspec.field(default=None, name="podIP")
    conditions: list[_Condition] | None = None


class Pod(msgspec.Struct):
    """The fields of a pod that make it an engine."""

    metadata: Meta
    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _Status = msgspec.field(default_factory=_Status)


def read_pod(
    meta: Meta,
    raw: msgspec.Raw,
    port: int | None = None,
    *,
    is_first: bool = True,
    slice_label: str = Mark.SLICE,
) -> Wanted | AddressError | None:
    """Parse a pod; an error is returned, not raised.

    ``port``: of the engine (an InferencePool's), unless the pod names another; ``is_first``: it is
    the first of several ports, which is the engine of a pod that names its own port;
    ``slice_label``: the label of its slice.
    """
    try:
        pod = decode(raw, Pod)
        return (
            engine_of(pod, port, slice_label) if is_first or _mark(pod, Mark.PORT) is None else None
        )
    except AddressError as exc:
        return exc
    except NotJson as exc:
        return AddressError(f"pod {meta.name} is not what Kubernetes calls a pod: {exc}")


def engine_of(pod: Pod, port: int | None = None, slice_label: str = Mark.SLICE) -> Wanted | None:
    """Return the pod's engine; None: it has none now, or is a worker of another pod's engine.

    A pod that is being deleted, or is not ready, leaves: it gets no new requests, and keeps its
    record in case it becomes ready again. Streams move away from a deleted pod if its label says
    so; a pod that is not ready may come back.

    Raises:
        AddressError: a label is invalid; the message names the pod and the label.
    """
    labels = pod.metadata.labels or {}
    if (
        pod.status.ip is None
        or pod.status.phase in ("Failed", "Succeeded")
        or labels.get(WORKER_INDEX, "0") != "0"
    ):
        return None
    role = _mark(pod, Mark.ROLE)
    if role is None:
        return None
    if role not in tuple(EngineRole):
        raise _wrong(pod, Mark.ROLE, role, "prefill, decode or both")
    if (is_both := role == EngineRole.BOTH) and _mark(pod, Mark.RANKS) is not None:
        raise _wrong(
            pod,
            Mark.ROLE,
            role,
            f"prefill or decode: {Mark.RANKS} is set, and such an engine cannot turn",
        )
    is_ready = any(
        condition.type == "Ready" and condition.status == "True"
        for condition in pod.status.conditions or ()
    )
    is_deleted = pod.metadata.deletion_timestamp is not None
    move = _mark(pod, Mark.MOVE) or "false"
    if move not in ("true", "false"):
        raise _wrong(pod, Mark.MOVE, move, "true or false")
    target = _target(pod, pod.status.ip, port, slice_label)
    leaves = is_deleted or not is_ready
    moves = is_deleted and move == "true"
    # An engine of both roles is in the pool of decode engines: its key and its name are theirs.
    return Wanted(
        Role.DECODE if is_both else Role(role), target, pod.metadata.uid, leaves, moves, is_both
    )


def _target(pod: Pod, ip: str, port: int | None, slice_label: str) -> Target:
    host = f"[{ip}]" if ":" in ip else ip
    scheme = _mark(pod, Mark.SCHEME) or "http"
    revision = _mark(pod, Mark.REVISION)
    options = {"dp": _mark(pod, Mark.RANKS), "mode": _mark(pod, Mark.MODE)}
    if scheme not in ("http", "https"):
        raise _wrong(pod, Mark.SCHEME, scheme, "http or https")
    names: dict[str, str | None] = {Mark.REVISION: revision, slice_label: _mark(pod, slice_label)}
    for mark, name in names.items():
        if name is not None and not REVISION.fullmatch(name):
            raise _wrong(pod, mark, name, "at most 63 letters, digits, '-', '_' and '.'")
    options |= {"revision": revision, "slice": names[slice_label]}
    fragment = "&".join(f"{name}={value}" for name, value in options.items() if value)
    text = f"{scheme}://{host}:{_port(pod, port)}" + (f"#{fragment}" if fragment else "")
    try:
        return Target.parse(text)
    except AddressError as exc:
        raise AddressError(f"pod {pod.metadata.name}: {exc}") from exc


def _port(pod: Pod, pool_port: int | None) -> str:
    if (number := _mark(pod, Mark.PORT)) is not None:
        return number
    if pool_port is not None:
        return str(pool_port)
    ports = [port for container in pod.spec.containers for port in container.ports or ()]
    for port in ports:
        if port.name == PORT_NAME:
            return str(port.container_port)
    missing = f"pod {pod.metadata.name} has no container port named {PORT_NAME}"
    raise AddressError(f"{missing}: name one, or write the number into {Mark.PORT}")


def _mark(pod: Pod, mark: str) -> str | None:
    meta = pod.metadata
    return (meta.annotations or {}).get(mark) or (meta.labels or {}).get(mark) or None


def _wrong(pod: Pod, mark: str, value: str, right: str) -> AddressError:
    return AddressError(f"pod {pod.metadata.name}: {mark} is {value!r}: write {right}")

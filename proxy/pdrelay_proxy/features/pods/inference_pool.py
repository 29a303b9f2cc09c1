"""An InferencePool of the Gateway API Inference Extension: its pods, and their engines' ports.

The API is inference.networking.k8s.io/v1 (config/crd/bases of
kubernetes-sigs/gateway-api-inference-extension). Its endpoint picker plays no part here: the router
chooses engines itself.
"""

import re
from dataclasses import dataclass
from typing import Final

import msgspec

from pdrelay_proxy.core.discovery.kubernetes_objects import Meta
from pdrelay_proxy.core.raw_json import NotJson, decode
from pdrelay_proxy.features.pods.settings import LABEL_KEY

PATH: Final = "/apis/inference.networking.k8s.io/v1/namespaces/{}/inferencepools"
_HTTP: Final = "http"  # appProtocol
_PORTS_MOST: Final = 8  # as in the CRD
_LABELS_MOST: Final = 64
_VALUE: Final = re.compile(r"(?:[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")


@dataclass(frozen=True, slots=True)
class PoolMembers:
    """The pods and ports of a pool."""

    selector: str  # as the API takes it: a=b,c=d
    ports: tuple[int, ...]  # of a pod; each is an engine


@dataclass(frozen=True, slots=True)
class UnusablePool:
    """A pool that cannot be used, and why."""

    reason: str


class _Selector(msgspec.Struct, rename="camel"):
    match_labels: dict[str, str]


class _TargetPort(msgspec.Struct):
    number: int


class _PoolSpec(msgspec.Struct, rename="camel"):
    selector: _Selector
    target_ports: list[_TargetPort]
    app_protocol: str = _HTTP


class _Pool(msgspec.Struct):
    spec: _PoolSpec


def read_pool(meta: Meta, raw: msgspec.Raw) -> PoolMembers | UnusablePool:
    """Parse a pool; an error is returned, not raised.

    A selector without labels is refused: it would select all pods.
    """
    try:
        spec = decode(raw, _Pool).spec
    except NotJson as exc:
        return UnusablePool(f"InferencePool {meta.name} is not what its API calls one: {exc}")
    labels = spec.selector.match_labels
    ports = [port.number for port in spec.target_ports]
    if spec.app_protocol != _HTTP:
        return UnusablePool(
            f"InferencePool {meta.name} has appProtocol {spec.app_protocol!r}: engines speak http"
        )
    if not 0 < len(labels) <= _LABELS_MOST or not all(
        LABEL_KEY.fullmatch(key) and _VALUE.fullmatch(value) for key, value in labels.items()
    ):
        return UnusablePool(
            f"InferencePool {meta.name} has no labels, or some that are none: matchLabels needs "
            f"them"
        )
    if not 0 < len(set(ports)) == len(ports) <= _PORTS_MOST or not all(
        0 < port < 65536 for port in ports
    ):
        return UnusablePool(
            f"InferencePool {meta.name} has targetPorts {ports}: write 1 to {_PORTS_MOST} ports"
        )
    return PoolMembers(
        ",".join(f"{key}={value}" for key, value in sorted(labels.items())), tuple(ports)
    )

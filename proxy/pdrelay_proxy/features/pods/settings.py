"""The settings of the discovery of pods."""

import re
from dataclasses import dataclass
from typing import Annotated, Final

from pdrelay_proxy.declarations import Group, Kind

# The keys that Kubernetes allows for labels.
LABEL_KEY: Final = re.compile(
    r"(?:[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
)
# of Kubernetes objects (RFC 1123)
_OBJECT_NAME: Final = re.compile(r"[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?")
KUBERNETES: Final = Group("Kubernetes")
LabelKey = Annotated[
    str,
    Kind(
        "the key of a label: write such as pdrelay/slice or topology.kubernetes.io/zone",
        "LABEL",
        check=lambda text: text if LABEL_KEY.fullmatch(text) else None,
    ),
]
PoolName = Annotated[
    str,
    Kind(
        "the name of an InferencePool: write lower-case letters, digits, '-' and '.'",
        "POOL",
        check=lambda text: text if _OBJECT_NAME.fullmatch(text) else None,
    ),
]
Selector = Annotated[str, Kind("", "LABEL=VALUE")]


@dataclass(frozen=True, slots=True)
class PodSettings:
    """The choices, in the order of ``--help``."""

    # fmt: off
    kubernetes_selector: Selector | None = KUBERNETES.option(None,
        "label selector of the pods that are engines", unset="no pods", chart="router.discovery.enabled")
    kubernetes_inference_pool: PoolName | None = KUBERNETES.option(None,
        "InferencePool whose pods are the engines, instead of a selector",
        unset="no pods", chart="router.discovery.inferencePool")
    kubernetes_namespace: str | None = KUBERNETES.option(None,
        "namespace of the pods and of the InferencePool", unset="the router's own", chart="router.discovery.enabled")
    slice_label: LabelKey = KUBERNETES.option("pdrelay/slice", "label or annotation of pods that names their slice")
    # fmt: on


SETTINGS: Final = PodSettings

"""The settings of the discovery of pods."""

from dataclasses import dataclass
from typing import Final

from pdrelay_proxy.declarations import Group, LabelKey, PoolName, Selector

KUBERNETES: Final = Group("Kubernetes")


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

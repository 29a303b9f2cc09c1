"""The settings of pods that are engines."""

from dataclasses import dataclass
from typing import Final

from pdrelay_proxy.declarations import LabelKey, PoolName, Selector
from pdrelay_proxy.settings import KUBERNETES


@dataclass(frozen=True, slots=True)
class PodSettings:
    """The choices, in the order of ``--help``."""

    # fmt: off
    kubernetes_selector: Selector | None = KUBERNETES.option(None,
        "label selector of the pods that are engines", unset="no pods", chart="router.discovery.enabled")
    kubernetes_inference_pool: PoolName | None = KUBERNETES.option(None,
        "InferencePool whose pods are the engines, instead of a selector",
        unset="no pods", chart="router.discovery.inferencePool")
    slice_label: LabelKey = KUBERNETES.option("pdrelay/slice", "label or annotation of pods that names their slice")
    # fmt: on


SETTINGS: Final = PodSettings

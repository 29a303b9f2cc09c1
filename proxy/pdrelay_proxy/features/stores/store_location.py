"""The place that ``store`` names, which has engines and short texts of several routers."""

import os
from collections.abc import Callable
from dataclasses import dataclass

from pdrelay_proxy.core.ports import SharedText
from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.features.kubernetes.client import Cluster, Kubernetes
from pdrelay_proxy.features.stores.configmap import ConfigMapStore
from pdrelay_proxy.features.stores.file import FileStore
from pdrelay_proxy.features.stores.file_text import FileText
from pdrelay_proxy.features.stores.lease_text import LeaseText
from pdrelay_proxy.io.discovery.store import Store, StoreObserver


@dataclass(frozen=True, slots=True)
class StoreLocation:
    """``file:PATH``, ``kubernetes:[NAMESPACE/]CONFIGMAP``, or the URL of a Redis."""

    setting: str

    def engines(self, observer: StoreObserver, clock: Callable[[], float]) -> Store:
        """Return the store of engines; raises ConfigError: this is no pod, redis is missing, or its
        URL is wrong.
        """
        kind, _, location = self.setting.partition(":")
        match kind:
            case "file":
                return FileStore(location, observer)
            case "kubernetes":
                api, config_map = _config_map(location)
                return ConfigMapStore(api, config_map, observer, clock=clock)
            case _:
                try:
                    from pdrelay_proxy.features.stores.redis import RedisStore  # noqa: PLC0415 (its library is an extra)
                except ImportError as exc:
                    raise ConfigError(
                        "the store is Redis, but redis is not installed: "
                        "pip install 'pdrelay[redis]'"
                    ) from exc
                return RedisStore(self.setting, observer, password=_redis_password())

    def text(self, name: str, *, lasts_s: float) -> SharedText:
        """Return a text beside the engines, whose store has been made."""
        kind, _, location = self.setting.partition(":")
        match kind:
            case "file":
                return FileText(f"{location}.{name}")
            case "kubernetes":
                api, config_map = _config_map(location)
                return LeaseText(api, config_map, f"pdrelay/{name}", lasts_s=lasts_s)
            case _:
                from pdrelay_proxy.features.stores.redis import RedisText  # noqa: PLC0415 (``engines`` has loaded it)

                return RedisText(self.setting, name, password=_redis_password())


def _config_map(location: str) -> tuple[Kubernetes, str]:
    """Return a client for a ConfigMap's namespace (unless written: the router's own), and its
    name.
    """
    namespace, _, name = location.rpartition("/")
    return Kubernetes(Cluster.around(namespace or None)), name


def _redis_password() -> str | None:
    return os.environ.get("PDRELAY_REDIS_PASSWORD")

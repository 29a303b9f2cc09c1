"""How the store of the settings comes into a router, and into several workers."""

import sys
import time

import pytest

from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.features.stores.feature import StoresFeature
from pdrelay_proxy.features.stores.settings import StoreSettings
from pdrelay_proxy.settings import Settings
from support.store_ear import Ear


def chosen(store):
    return Settings().with_features(StoreSettings(store))


def test_workers_share_a_file_in_place_of_their_memory():
    """An operator adds an engine at one of them, and all serve it."""
    assert StoresFeature.for_workers(Settings(), lambda: "/tmp/x") == (StoreSettings("file:/tmp/x/engines"),)


def test_workers_share_the_store_of_the_settings_and_need_no_folder():
    """A folder is made only for what goes there."""

    def folder():
        raise AssertionError("nothing goes there")

    assert StoresFeature.for_workers(chosen("file:/var/lib/engines"), folder) == ()


def test_a_memory_is_not_shared():
    """Features that must agree with other routers ask for this."""
    assert StoresFeature.shared_store(Settings()) is None
    assert StoresFeature.shared_store(chosen("redis://h:6379/0")) is not None


def test_a_redis_without_its_library_is_refused_with_the_command_that_installs_it(monkeypatch):
    """It is an extra."""
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    monkeypatch.delitem(sys.modules, "pdrelay_proxy.features.stores.redis", raising=False)

    with pytest.raises(ConfigError, match=r"redis is not installed: pip install 'pdrelay\[redis\]'"):
        StoresFeature.shared_store(chosen("redis://h:6379/0")).engines(Ear(), time.monotonic)


@pytest.mark.parametrize(
    "url",
    ["redis://h:port/0", "redis://h:1/0?tls=yes", "redis://h:1/0?socket_timeout=soon", "redis://h:1?ssl_ca_certs=x"],
)
def test_a_redis_that_its_library_does_not_take_is_refused_at_the_start(url):
    """It would fail at each look, several times a second."""
    with pytest.raises(ConfigError, match=r"store is redis://h:.* refuses: .*write redis://host:port/0"):
        StoresFeature.shared_store(chosen(url)).engines(Ear(), time.monotonic)


def test_a_configmap_needs_a_cluster(monkeypatch):
    """The router reads its address from the pod's environment."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)

    with pytest.raises(ConfigError, match="this is no pod"):
        StoresFeature.shared_store(chosen("kubernetes:engines")).engines(Ear(), time.monotonic)

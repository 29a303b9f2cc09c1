"""An InferencePool as the source of engines: its selector and its ports, and what becomes of them when it changes."""

import random
import time
from argparse import ArgumentTypeError
from contextlib import asynccontextmanager

import pytest

from pdrelay_proxy.cli import main
from pdrelay_proxy.consistency import check
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.fleet.target import EngineSource
from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.features.kubernetes.client import Cluster, Kubernetes
from pdrelay_proxy.features.kubernetes.reflector import WatchTimes
from pdrelay_proxy.features.pods.pool_source import PoolSource
from pdrelay_proxy.features.pods.settings import PodSettings
from pdrelay_proxy.io.discovery.engine_objects import EngineObjects
from pdrelay_proxy.io.discovery.reconciler import Reconciler
from pdrelay_proxy.known_settings import OPTIONS
from pdrelay_proxy.setting_values import read
from pdrelay_proxy.settings import Settings
from support.kube_api import KubeApi, Refusal, pod, pool
from support.sim import until_async

pytestmark = pytest.mark.edges


FAST = WatchTimes(relist_s=30, silence_s=20.0, pause_s=0.02, pause_most_s=0.1)


class World:
    """A registry that follows the pool "llm"."""

    def __init__(self, api):
        self.registry = Registry()
        self.reconciler = Reconciler(self.registry, [EngineSource.PODS], time.monotonic)
        cluster = Cluster(api.url, "default")
        self.source = PoolSource(
            lambda: Kubernetes(cluster, timeout_s=5),
            "llm",
            EngineObjects(self.reconciler),
            clock=time.monotonic,
            chance=random.random,
            rhythm=FAST,
        )

    @property
    def known(self):
        return sorted(f"{one.instance.role} {one.instance.address.authority}" for one in self.registry.members())

    async def becomes(self, *expected):
        try:
            await until_async(lambda: self.known == sorted(expected))
        except TimeoutError:
            assert self.known == sorted(expected)


@asynccontextmanager
async def following():
    """Follow a pool of an API that has three pods, of which two are labelled ``app: pdrelay``."""
    async with KubeApi() as api:
        api.put("pods", "p", pod("10.0.0.1"))
        api.put("pods", "d", pod("10.0.0.2", "decode"))
        other = pod("10.0.0.3", "decode")
        other["metadata"]["labels"]["app"] = "next"
        api.put("pods", "other", other)
        world = World(api)
        async with world.source.running():
            yield api, world


async def test_the_pods_of_the_pool_are_the_engines_at_its_port():
    """The role is that of the label, as with a selector; the port is the pool's, though the pod names others."""
    async with following() as (api, world):
        api.put("inferencepools", "other", pool({"app": "next"}, 9999))
        api.put("inferencepools", "llm", pool({"app": "pdrelay"}, 9000))
        await world.becomes("prefill 10.0.0.1:9000", "decode 10.0.0.2:9000")
        api.put("pods", "d2", pod("10.0.0.4", "decode"))
        await world.becomes("prefill 10.0.0.1:9000", "decode 10.0.0.2:9000", "decode 10.0.0.4:9000")
        api.delete("pods", "p")
        await world.becomes("decode 10.0.0.2:9000", "decode 10.0.0.4:9000")

    watched = {call.name for call in api.calls if call.resource == "inferencepools"}
    assert watched == {"llm"}  # the Role of the chart allows this one alone


async def test_a_pool_that_selects_others_is_followed():
    async with following() as (api, world):
        api.put("inferencepools", "llm", pool({"app": "pdrelay"}, 9000))
        await world.becomes("prefill 10.0.0.1:9000", "decode 10.0.0.2:9000")
        api.put("inferencepools", "llm", pool({"app": "next"}, 9001))
        await world.becomes("decode 10.0.0.3:9001")
        api.put("inferencepools", "llm", pool({"app": "pdrelay", "pdrelay/role": "decode"}, 9001))
        await world.becomes("decode 10.0.0.2:9001")


async def test_every_port_of_a_pool_is_an_engine():
    """As the API has it; a pod that names its port itself has one."""
    async with following() as (api, world):
        api.put("pods", "one", pod("10.0.0.5", annotations={"pdrelay/port": "7000"}))
        api.put("inferencepools", "llm", pool({"app": "pdrelay"}, 9000, 9001))
        every = ["prefill 10.0.0.1:9000", "prefill 10.0.0.1:9001", "decode 10.0.0.2:9000", "decode 10.0.0.2:9001"]
        await world.becomes(*every, "prefill 10.0.0.5:7000")
        api.delete("pods", "p")
        await world.becomes(*every[2:], "prefill 10.0.0.5:7000")


async def test_without_the_pool_the_router_is_not_ready():
    """It does not know whether there are engines."""
    async with following() as (api, world):
        await until_async(lambda: api.watches == 1)
        missing = world.reconciler.sources.missing
        api.put("inferencepools", "llm", pool({"app": "nobody"}, 9000))
        await until_async(lambda: not world.reconciler.sources.missing)

        assert missing == [EngineSource.PODS]
        assert world.known == []


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (None, "there is no InferencePool llm"),
        (pool({}, 8000), "has no labels"),
        (pool({"app": "a,b"}, 8000), "has no labels, or some that are none"),
        (pool({"app": "next"}), "has targetPorts []"),
        (pool({"app": "next"}, 8000, 8000), "has targetPorts"),
        (pool({"app": "next"}, 8000, appProtocol="kubernetes.io/h2c"), "appProtocol 'kubernetes.io/h2c'"),
        ({"spec": {"selector": "app=next"}}, "is not what its API calls one"),
    ],
    ids=["gone", "no labels", "no label", "no ports", "twice", "h2c", "no pool"],
)
async def test_a_pool_that_is_gone_or_makes_no_sense_changes_nothing(bad, words, caplog):
    """Somebody writes it anew: an outage would be a high price for the moment between."""
    async with following() as (api, world):
        api.put("inferencepools", "llm", pool({"app": "pdrelay"}, 9000))
        await world.becomes("prefill 10.0.0.1:9000", "decode 10.0.0.2:9000")
        if bad is None:
            api.delete("inferencepools", "llm")
        else:
            api.put("inferencepools", "llm", bad)
        await until_async(lambda: words in caplog.text)
        api.put("pods", "d2", pod("10.0.0.4", "decode"))
        await world.becomes("prefill 10.0.0.1:9000", "decode 10.0.0.2:9000", "decode 10.0.0.4:9000")
        api.put("inferencepools", "llm", pool({"app": "next"}, 9000))
        await world.becomes("decode 10.0.0.3:9000")


async def test_a_watch_that_fails_costs_time_and_no_engine():
    async with following() as (api, world):
        api.put("inferencepools", "llm", pool({"app": "pdrelay"}, 9000))
        await world.becomes("prefill 10.0.0.1:9000", "decode 10.0.0.2:9000")
        api.faults.refusals.extend([Refusal(500, "InternalError")] * 3)
        api.faults.watch_errors.extend([Refusal(410, "Expired")] * 2)
        api.put("inferencepools", "llm", pool({"app": "next"}, 9000))
        await world.becomes("decode 10.0.0.3:9000")


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("kubernetes_inference_pool", "llm-pool.v1", ["ns/llm", "LLM", "-a", ""]),
        ("slice_label", "topology.kubernetes.io/zone", ["a b", "/zone", "zone/", "x=y", ""]),
    ],
)
def test_names_that_kubernetes_would_refuse_are_refused_at_the_start(name, good, bad):
    """Such a router would wait for ever for a pool that cannot be."""
    kind = OPTIONS[name].kind

    assert read(kind, good) == good
    for text in bad:
        with pytest.raises(ArgumentTypeError):
            read(kind, text)


def test_a_pool_and_a_selector_are_one_too_many():
    with pytest.raises(ConfigError, match="kubernetes_inference_pool has a selector of its own"):
        check(Settings().with_features(PodSettings("app=x", "llm")))


async def test_pods_of_a_pool_have_slices_too():
    """By the label that the settings name."""
    async with KubeApi() as api:
        api.put("pods", "p", pod("10.0.0.1", slice="rack-1"))
        api.put("inferencepools", "llm", pool({"app": "pdrelay"}, 9000))
        world = World(api)
        async with world.source.running():
            await world.becomes("prefill 10.0.0.1:9000")

        assert [member.facts.slice for member in world.registry.members()] == ["rack-1"]


def test_pods_without_a_cluster_are_refused_at_the_start(monkeypatch, capsys):
    """Not when the first request comes."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert main(["serve", "--kubernetes-selector", "app=pdrelay"]) != 0
    assert "KUBERNETES_SERVICE_HOST" in capsys.readouterr().err

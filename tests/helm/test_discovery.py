"""The chart and the router's own discovery: what the router asks is allowed, and what the pods say is understood."""

import json
import shutil
import ssl

import msgspec
import pytest
import yaml

from pdrelay_proxy.core.model import Role
from pdrelay_proxy.features.pods.pod import Pod, engine_of
from pdrelay_tools.simulated.engine import Sim
from support.certificates import Authority
from support.chart_router import serving_chart
from support.documents import blocks
from support.helm_chart import CASES, ROOT, Chart, default
from support.helm_objects import COMPONENT, WORKER_INDEX, kind, pods
from support.kube_api import KubeApi, pod, pool

pytestmark = pytest.mark.processes


READY = {"phase": "Running", "podIP": "10.0.0.7", "conditions": [{"type": "Ready", "status": "True"}]}


def seen(meta, spec, **labels):
    """Return what the router makes of a pod of the chart that runs."""
    labels = {**meta["labels"], **labels}
    body = {"metadata": {**meta, "name": "x", "uid": "u", "labels": labels}, "spec": spec, "status": READY}
    return engine_of(msgspec.json.decode(json.dumps(body).encode(), type=Pod))


@pytest.mark.parametrize("case", CASES)
def test_the_router_understands_the_pods_of_the_chart(case):
    """Role, address, ranks, mode and revision; workers of an engine are none themselves."""
    found = {}
    for _, meta, spec in pods(default(case)):
        component = meta["labels"][COMPONENT]
        wanted = seen(meta, spec)
        if component not in ("prefill", "decode"):
            assert wanted is None
            continue
        ports = {port["name"]: port["containerPort"] for port in spec["containers"][0].get("ports", ())}
        if "http" not in ports:
            assert seen(meta, spec, **{WORKER_INDEX: "1"}) is None
            continue
        found[component] = wanted
        assert wanted.role is Role(component)
        assert wanted.serves == meta["labels"]["pdrelay/role"]
        assert wanted.target.address.host == "10.0.0.7"
        assert wanted.target.address.port == ports["http"]
    assert found["decode"].target.revision is not None
    assert {one.target.revision for one in found.values()} == {found["decode"].target.revision}


def test_ranks_and_mode_reach_the_router():
    """Two ranks in a pod are two instances; engines that push say so before their first answer."""
    (two,) = [seen(m, s) for _, m, s in pods(default("2p4d")) if m["labels"][COMPONENT] == "decode"]
    modes = {seen(m, s).target.mode for _, m, s in pods(default("tp8-multinode")) if "pdrelay/role" in m["labels"]}

    assert two.target.ranks == (0, 1)
    assert [str(mode) for mode in modes] == ["push"]


@pytest.fixture
def account(tmp_path, monkeypatch):
    """What a pod has of its service account, and the API's certificate."""
    authority = Authority(tmp_path, "authority")
    server = authority.sign("api")
    shutil.copy(authority.own.cert, tmp_path / "ca.crt")
    (tmp_path / "token").write_text("first\n")
    (tmp_path / "namespace").write_text("ns")
    monkeypatch.setenv("PDRELAY_SERVICE_ACCOUNT", str(tmp_path))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("ADMIN_API_KEY", "sesame")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(server.cert, server.key)
    return tls


async def test_a_router_of_the_chart_finds_the_engines_of_the_chart_with_the_calls_of_its_role(account, monkeypatch):
    """With the arguments of its pod, against an API that has the release's pods and the chart's empty ConfigMap."""
    objects = Chart().objects({"router": {"peers": {"enabled": False}}})  # its port may be taken here
    (role,) = kind(objects, "Role")
    (store,) = [o for o in kind(objects, "ConfigMap") if o["metadata"]["name"] == "r-pdrelay-instances"]
    async with KubeApi(token="first", tls=account) as api:
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.port))
        api.put("configmaps", store["metadata"]["name"], {"metadata": dict(store["metadata"])}, "ns")
        engines = {"new": Sim("decode")}
        for number, (_, meta, spec) in enumerate(pods(objects)):
            engines[ip := f"10.0.0.{number + 1}"] = Sim(meta["labels"].get("pdrelay/role", "decode"))
            api.put(
                "pods", f"pod-{number}", {"metadata": dict(meta), "spec": spec, "status": READY | {"podIP": ip}}, "ns"
            )
        async with serving_chart(objects, engines) as client:
            rows = (await client.get("/instances")).json()["instances"]
            added = await client.post("/instances/add", json={"type": "decode", "instance": "new:80"})

    assert sorted(row["role"] for row in rows) == ["decode", "prefill"]
    assert (added.status_code, len(api.objects["configmaps", "ns", "r-pdrelay-instances"]["data"])) == (200, 1)
    rules = [(g, r, rule) for rule in role["rules"] for g in rule["apiGroups"] for r in rule["resources"]]
    assert {("", call.resource, call.verb) for call in api.calls} == {
        (g, r, v) for g, r, o in rules for v in o["verbs"]
    }
    assert {(call.resource, call.namespace, call.name, call.selector) for call in api.calls} == {
        ("pods", "ns", "", "pdrelay/release=r"),
        ("configmaps", "ns", "r-pdrelay-instances", ""),
    }


async def test_a_router_of_the_chart_follows_an_inference_pool_with_the_calls_of_its_role(account, monkeypatch):
    """In place of the release's own pods, and no other pool than the named one."""
    objects = Chart().objects(
        {"router": {"discovery": {"inferencePool": "llm"}, "store": {"type": "memory"}, "replicas": 1}}
    )
    (role,) = kind(objects, "Role")
    async with KubeApi(token="first", tls=account) as api:
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.port))
        api.put("inferencepools", "llm", pool({"app": "llm"}, 9000), "ns")
        engines = {}
        for number, part in enumerate(("prefill", "decode")):
            ip = f"10.0.0.{number + 1}"
            engines[ip] = Sim(part)
            body = pod(ip, part, port=None)
            body["metadata"]["labels"]["app"] = "llm"
            api.put("pods", part, body, "ns")
        async with serving_chart(objects, engines) as client:
            rows = (await client.get("/instances")).json()["instances"]

    assert sorted(row["address"] for row in rows) == ["10.0.0.1:9000", "10.0.0.2:9000"]
    allowed = {
        (g, r, tuple(rule.get("resourceNames", ())))
        for rule in role["rules"]
        for g in rule["apiGroups"]
        for r in rule["resources"]
    }
    assert allowed == {("", "pods", ()), ("inference.networking.k8s.io", "inferencepools", ("llm",))}
    assert {verb for rule in role["rules"] for verb in rule["verbs"]} == {call.verb for call in api.calls}
    assert {(call.resource, call.namespace, call.name, call.selector) for call in api.calls} == {
        ("pods", "ns", "", "app=llm"),
        ("inferencepools", "ns", "llm", ""),
    }


def test_the_route_of_the_page_about_cells_is_one():
    """People copy it: it leads to services of the chart. test_documented_values.py has it read by its schema."""
    (route,) = map(yaml.safe_load, blocks((ROOT / "docs/cells.md").read_text(), "yaml"))
    services = {name: Chart().objects(release=name) for name in ("a", "b")}

    (rule,) = route["spec"]["rules"]
    for backend, objects in zip(rule["backendRefs"], services.values(), strict=True):
        (service,) = [o for o in kind(objects, "Service") if o["metadata"]["name"] == backend["name"]]
        assert backend["port"] in [port["port"] for port in service["spec"]["ports"]]

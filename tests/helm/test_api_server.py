"""The chart in a real Kubernetes API: field ownership, defaults, validation, RBAC and Pod Security are the API's own.

``PDRELAY_TEST_KUBECONFIG`` names the cluster; without nodes and controllers it is enough. Kinds that it lacks (KEDA's,
for example) are skipped.
"""

import asyncio
import secrets
import time
from contextlib import AsyncExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from pdrelay_proxy.features.kubernetes.client import Cluster, Kubernetes
from pdrelay_proxy.features.stores.configmap import ConfigMapStore
from pdrelay_tools.simulated.engine import Sim
from support.api_server import AUTOSCALER, BY_HAND, KUBECONFIG, STRICT, WHY_NOT, ApiServer, Release, warnings
from support.chart_router import serving_chart
from support.helm_chart import CI, HELMS, Chart, Refused, names_of_ci
from support.helm_objects import WORKLOADS, kind, pods, templates
from support.store_ear import Ear

pytestmark = [
    pytest.mark.thorough,  # needs a cluster, which CI has not
    pytest.mark.skipif(not Path(KUBECONFIG).is_file(), reason=WHY_NOT),
]

HPA = {"type": "hpa", "min": 2, "max": 12}
KEDA = {"type": "keda", "min": 2, "max": 12}
OFF = {"type": "none"}
MONITORED = {"podMonitor": {"enabled": True}}
LWS = "leaderworkerset.x-k8s.io/v1"
# Who installs and who upgrades. By itself helm 4 goes on with helm 3's way of applying in a release of helm 3.
CLIENTS = {
    "helm3": ("helm3", "helm3", ()),
    "helm4": ("helm4", "helm4", ()),
    "3-then-4": ("helm3", "helm4", ()),
    "3-then-4-server-side": ("helm3", "helm4", ("--server-side=true",)),
    "4-then-3": ("helm4", "helm3", ()),
}


@pytest.fixture(scope="module")
def api():
    with ApiServer(KUBECONFIG) as api:
        yield api


@pytest.fixture
def namespace(api):
    """A new one, which has what a controller puts into every namespace (there may be no controller here)."""
    name = f"pdrelay-test-{secrets.token_hex(4)}"
    api.made("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    api.call("POST", api.path("v1", "ConfigMap", name), {"metadata": {"name": "kube-root-ca.crt"}})
    yield name
    api.call("DELETE", f"/api/v1/namespaces/{name}")


@pytest.fixture
def release(api, namespace):
    return Release(api, namespace)


def lacking(api, workload, autoscaling=OFF):
    """Skip where the cluster lacks what this takes."""
    needed = [(LWS, "LeaderWorkerSet")] if workload == "LeaderWorkerSet" else []
    if autoscaling is KEDA:
        needed += [("keda.sh/v1alpha1", "ScaledObject"), ("monitoring.coreos.com/v1", "PodMonitor")]
    for version, name in needed:
        if not api.has(version, name):
            pytest.skip(f"the cluster has no {name}")


def pools(workload, autoscaling, **more):
    """Return values: 6 decode engines, or as many as an autoscaler says."""
    pool = {"kind": workload, "autoscaling": autoscaling} | more
    values = {"prefill": {"replicas": 3, **pool}, "decode": {"replicas": 6, **pool}}
    return values | ({"monitoring": MONITORED} if autoscaling is KEDA else {})


@pytest.mark.parametrize("clients", CLIENTS)
@pytest.mark.parametrize("autoscaling", [HPA, KEDA], ids=["hpa", "keda"])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_number_of_engines_that_run_outlives_every_upgrade(api, release, workload, autoscaling, clients):
    """From a fixed number to an autoscaler, while it scales, and back: each engine less would lose its requests."""
    lacking(api, workload, autoscaling)
    first, then, flags = CLIENTS[clients]
    release.install(first, pools(workload, OFF))
    seen = [release.replicas("decode", workload)]
    release.upgrade(then, pools(workload, autoscaling), *flags)
    seen.append(release.replicas("decode", workload))
    release.scale("decode", 9, workload, who=AUTOSCALER)
    release.upgrade(then, pools(workload, autoscaling) | {"model": {"maxLength": 4096}}, *flags)
    seen.append(release.replicas("decode", workload))
    release.scale("decode", 4, workload, who=AUTOSCALER)
    release.upgrade(then, pools(workload, autoscaling) | {"model": {"maxLength": 8192}}, *flags)
    seen.append(release.replicas("decode", workload))
    release.upgrade(then, pools(workload, OFF), *flags)
    seen.append(release.replicas("decode", workload))
    release.upgrade(then, pools(workload, OFF) | {"model": {"maxLength": 4096}}, *flags)
    seen.append(release.replicas("decode", workload))

    assert seen == [6, 6, 9, 4, 4, 4]
    assert release.replicas("prefill", workload) == 3


@pytest.mark.parametrize("clients", CLIENTS)
@pytest.mark.parametrize("autoscaling", [HPA, KEDA], ids=["hpa", "keda"])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_engines_scaled_by_hand_outlive_the_switch_to_an_autoscaler(api, release, workload, autoscaling, clients):
    """`kubectl scale` owns the number then, and the same number is no conflict with it."""
    lacking(api, workload, autoscaling)
    first, then, flags = CLIENTS[clients]
    release.install(first, pools(workload, OFF))
    release.scale("decode", 7, workload, who=BY_HAND)
    release.upgrade(then, pools(workload, OFF) | {"model": {"maxLength": 4096}}, *flags)
    seen = [release.replicas("decode", workload)]
    release.upgrade(then, pools(workload, autoscaling), *flags)
    seen.append(release.replicas("decode", workload))

    assert seen == [7, 7]


@pytest.mark.parametrize("clients", CLIENTS)
def test_the_number_of_routers_that_run_outlives_the_switch_to_an_autoscaler(release, clients):
    """Those that end would have streams."""
    first, then, flags = CLIENTS[clients]
    release.install(first, {"router": {"replicas": 3}})
    release.scale("router", 5, who=BY_HAND)
    scaled = {"router": {"replicas": 3, "autoscaling": {"type": "hpa", "min": 2, "max": 9}}}
    release.upgrade(then, scaled, *flags)
    seen = [release.replicas("router")]
    release.scale("router", 4, who=AUTOSCALER)
    release.upgrade(then, scaled | {"model": {"maxLength": 4096}}, *flags)
    seen.append(release.replicas("router"))

    assert seen == [5, 4]


@pytest.mark.parametrize("helm", HELMS)
def test_a_new_number_over_one_scaled_by_hand_is_said_or_taken(release, helm):
    """docs/kubernetes-operations.md: helm 4 names the owner, and `--force-conflicts` or that number by hand ends it."""
    release.install(helm, pools("Deployment", OFF))
    release.scale("decode", 4, who=BY_HAND)
    eight = pools("Deployment", OFF) | {"decode": {"replicas": 8}}
    if helm == "helm4":
        with pytest.raises(Refused, match=r'conflict with "kubectl" with subresource "scale"'):
            release.upgrade(helm, eight)
        assert release.replicas("decode") == 4
        release.upgrade(helm, eight, "--force-conflicts")
    else:
        release.upgrade(helm, eight)

    assert release.replicas("decode") == 8


@pytest.mark.parametrize("helm", HELMS)
def test_a_rollback_takes_an_autoscaled_pool_back_to_an_older_number(release, helm):
    """docs/kubernetes-operations.md: helm keeps the number of each revision; an upgrade keeps that which runs."""
    release.install(helm, pools("Deployment", OFF))
    release.upgrade(helm, pools("Deployment", HPA))
    release.scale("decode", 9, who=AUTOSCALER)
    if helm == "helm4":
        with pytest.raises(Refused, match='conflict with "kube-controller-manager" with subresource "scale"'):
            release.rollback(helm, 1)
    else:
        release.rollback(helm, 1)
    seen = [release.replicas("decode")]
    release.scale("decode", 9, who=AUTOSCALER)
    release.upgrade(helm, pools("Deployment", OFF))
    seen.append(release.replicas("decode"))

    assert seen == [{"helm3": 6, "helm4": 9}[helm], 9]


@pytest.mark.parametrize(("helm", "flag", "left"), [("helm3", "--atomic", 6), ("helm4", "--rollback-on-failure", 9)])
def test_an_upgrade_that_rolls_itself_back_does_the_same(release, helm, flag, left):
    """Helm 3 stops three engines because an image was missing; helm 4 leaves them. The next upgrade is a usual one."""
    scaled = pools("Deployment", HPA)
    release.install(helm, scaled)
    release.scale("decode", 9, who=AUTOSCALER)
    with pytest.raises(Refused, match="context deadline exceeded"):
        release.upgrade(helm, scaled | {"model": {"maxLength": 4096}}, flag, "--timeout", "5s")
    seen = [release.replicas("decode")]
    release.upgrade(helm, scaled | {"model": {"maxLength": 4096}})
    seen.append(release.replicas("decode"))

    assert seen == [left, left]


@pytest.mark.parametrize(("scaled", "left"), [(None, 1), (9, 9)], ids=["never-scaled", "scaled-before"])
def test_a_tool_that_renders_without_a_cluster_leaves_one_engine_unless_others_own_the_number(
    api, namespace, scaled, left
):
    """docs/kubernetes-operations.md: let it ignore the number first. The API makes 1 of a number that nobody owns."""
    release = Release(api, namespace)
    for autoscaling in (OFF, HPA):
        objects = Chart().objects(pools("Deployment", autoscaling), namespace=namespace)
        (workload,) = (o for o in kind(objects, "Deployment") if o["metadata"]["name"] == "r-pdrelay-decode")
        path = api.path("apps/v1", "Deployment", namespace, "r-pdrelay-decode")
        owner = {"fieldManager": "a-gitops-tool", "force": "true"}
        api.made("PATCH", path, workload, query=owner, kind="application/apply-patch+yaml")
        if scaled and autoscaling is OFF:
            release.scale("decode", scaled, who=AUTOSCALER)

    assert release.replicas("decode") == left


@pytest.mark.parametrize("clients", CLIENTS)
def test_the_set_of_both_pools_takes_an_autoscaler_and_leaves_it(api, release, clients):
    """By the rules of its definition. How many engines run then is its controller's business."""
    if not api.has("disaggregatedset.x-k8s.io/v1", "DisaggregatedSet"):
        pytest.skip("the cluster has no DisaggregatedSet")
    first, then, flags = CLIENTS[clients]
    of_set = {"disaggregatedSet": {"enabled": True}}
    release.install(first, pools("LeaderWorkerSet", OFF) | of_set)
    seen = []
    for autoscaling in (HPA, OFF):
        release.upgrade(then, pools("LeaderWorkerSet", autoscaling) | of_set, *flags)
        path = api.path("disaggregatedset.x-k8s.io/v1", "DisaggregatedSet", release.namespace, "r-pdrelay")
        roles = api.made("GET", path)["spec"]["roles"]
        seen.append([(role.get("scaling", {}).get("mode"), role["spec"].get("replicas")) for role in roles])

    assert seen == [[("External", 1), ("External", 1)], [(None, 3), (None, 6)]]


def cases(api, objects):
    """Skip a case with a kind that the cluster lacks."""
    for o in objects:
        if not api.has(o["apiVersion"], o["kind"]):
            pytest.skip(f"the cluster has no {o['kind']} of {o['apiVersion']}")


@pytest.mark.parametrize("case", names_of_ci())
def test_the_api_knows_every_field_of_the_chart_and_warns_of_none(api, namespace, case):
    """Strict: a field that is unknown, given twice or deprecated is an error or a warning."""
    objects = [o for o in Chart().render(ci=case, namespace=namespace) if o]
    cases(api, objects)
    said = {}
    for o in kind(objects, "ServiceAccount"):  # the pod of `helm test` names one
        api.made("POST", api.path("v1", "ServiceAccount", namespace), o, query={"fieldValidation": "Strict"})
    for o in objects:
        if o["kind"] == "ServiceAccount":
            continue
        answer = api.call("POST", api.path(o["apiVersion"], o["kind"], namespace), o, query=STRICT)
        if not answer.is_success or warnings(answer):
            said[f"{o['kind']} {o['metadata']['name']}"] = (answer.status_code, warnings(answer), answer.text[:500])

    assert not said


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize("file", CI, ids=names_of_ci())
def test_every_example_installs_upgrades_and_ends(api, release, file, helm):
    """With what each site has in its cluster."""
    cases(api, Chart().objects(ci=file.name.removesuffix("-values.yaml"), namespace=release.namespace))
    release.install(helm, files=[file])
    before = release.manifest(helm)
    release.upgrade(helm, files=[file])
    release.upgrade(helm, {"commonLabels": {"team": "serving"}}, files=[file])
    after = release.manifest(helm)
    release.uninstall(helm)

    assert len(after) == len(before)
    assert all(o["metadata"]["labels"]["team"] == "serving" for o in after)


def rules(api, namespace, account):
    """Return all that an account may do in its namespace, as the API reckons it; with the account's token."""
    asked = api.made("POST", f"{api.path('v1', 'ServiceAccount', namespace, account)}/token", {"spec": {}})
    token = asked["status"]["token"]
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectRulesReview", "spec": {"namespace": namespace}}
    found = api.made("POST", "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", body, token=token)["status"]
    assert not found["incomplete"]
    return {
        (group, resource, name, verb)
        for rule in found["resourceRules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for name in rule.get("resourceNames", ("",))
        for verb in rule["verbs"]
    }


@pytest.mark.parametrize(
    ("values", "more"),
    [
        ({}, set()),
        ({"store": {"type": "memory"}, "replicas": 1}, None),
        (
            {"settings": {"roles": "auto"}},
            {("coordination.k8s.io", "leases", "r-pdrelay-instances", v) for v in ("get", "patch")},
        ),
    ],
    ids=["default", "memory", "roles"],
)
def test_a_router_may_do_what_it_does_and_nothing_more(api, release, values, more):
    """And engines nothing at all, beyond what every account may."""
    release.install("helm4", {"router": values} | ({"connector": {"kvBoth": True}} if more else {}))
    path = api.path("v1", "ServiceAccount", release.namespace)
    api.made("POST", path, {"metadata": {"name": "anyone"}})
    anyone = rules(api, release.namespace, "anyone")

    store = {("", "configmaps", "r-pdrelay-instances", verb) for verb in ("list", "watch", "patch")}
    pods = {("", "pods", "", verb) for verb in ("list", "watch")}
    wanted = pods if more is None else pods | store | more
    assert rules(api, release.namespace, "r-pdrelay-router") - anyone == wanted
    assert rules(api, release.namespace, "r-pdrelay-engine") == anyone


# docs/kubernetes.md: what each level of Pod Security accepts.
LEVELS = {
    "default": ({}, "restricted"),
    "root": ({"prefill": {"runAsRoot": True}, "decode": {"runAsRoot": True}}, "baseline"),
    "rdma": ({"prefill": {"rdma": {"enabled": True}}, "decode": {"rdma": {"enabled": True}}}, "privileged"),
    "host-path": ({"model": {"volume": {"type": "hostPath", "hostPath": "/m"}, "name": "/models/m"}}, "privileged"),
    "host-network": (
        {part: {"hostNetwork": True} for part in ("prefill", "decode")} | {"connector": {"acceptOpenDataPlane": True}},
        "privileged",
    ),
}


def enforce(api, namespace, level):
    label = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": level}}}
    api.made("PATCH", f"/api/v1/namespaces/{namespace}", label, kind="application/merge-patch+json")


def refused(api, namespace, objects):
    """Return the workloads whose pods Pod Security refuses; accounts that pods name must exist."""
    for o in kind(objects, "ServiceAccount"):
        api.call("POST", api.path("v1", "ServiceAccount", namespace), o)
    found = {}
    for o in kind(objects, *WORKLOADS):
        for template in templates(o):
            body = {"metadata": template["metadata"] | {"name": "x"}, "spec": template["spec"]}
            answer = api.call("POST", api.path("v1", "Pod", namespace), body, query=STRICT)
            if answer.status_code == 403 and "PodSecurity" in answer.text:
                found[o["metadata"]["name"]] = answer.json()["message"]
            else:
                assert answer.is_success, answer.text
    return found


@pytest.mark.parametrize("case", LEVELS)
def test_pod_security_accepts_the_pods_from_the_level_that_the_page_names(api, namespace, case):
    """And refuses them one level below."""
    values, level = LEVELS[case]
    levels = ["restricted", "baseline", "privileged"]
    objects = Chart().objects(values, namespace=namespace)
    seen = {}
    for one in levels:
        enforce(api, namespace, one)
        seen[one] = not refused(api, namespace, objects)

    assert seen == {one: levels.index(one) >= levels.index(level) for one in levels}


ALONE = {"router": {"peers": {"enabled": False}}}  # the peers' port may be taken here


@pytest.fixture
def account(api, release, tmp_path, monkeypatch):
    """What the router's pod of an installed release has of its service account."""
    release.install("helm4", ALONE)
    asked = f"{api.path('v1', 'ServiceAccount', release.namespace, 'r-pdrelay-router')}/token"
    token = api.made("POST", asked, {"spec": {}})["status"]["token"]
    for name, text in {"token": token, "ca.crt": api.authority, "namespace": release.namespace}.items():
        (tmp_path / name).write_text(text)
    where = urlsplit(api.url)
    monkeypatch.setenv("PDRELAY_SERVICE_ACCOUNT", str(tmp_path))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", str(where.hostname))
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(where.port or 443))
    monkeypatch.setenv("ADMIN_API_KEY", "sesame")


def run_pod(api, namespace, name, meta, spec, ip):
    """Make a pod that a kubelet runs and has found ready, on a node that is not there."""
    body = {"metadata": meta | {"name": name}, "spec": spec | {"nodeName": "not-there"}}
    api.made("POST", api.path("v1", "Pod", namespace), body)
    be_ready(api, namespace, name, "True", podIP=ip, podIPs=[{"ip": ip}], phase="Running")


def be_ready(api, namespace, name, ready, **status):
    said = {"status": status | {"conditions": [{"type": "Ready", "status": ready}]}}
    path = api.path("v1", "Pod", namespace, name) + "/status"
    api.made("PATCH", path, said, kind="application/strategic-merge-patch+json")


async def until(client, wanted):
    """Wait until the router shows these states, by address."""
    async with asyncio.timeout(30):
        while await states(client) != wanted:
            await asyncio.sleep(0.05)


async def states(client):
    rows = (await client.get("/instances")).json()["instances"]
    return {row["address"].partition(":")[0]: row["state"] for row in rows}


@pytest.mark.usefixtures("account")
async def test_a_router_follows_the_pods_and_the_store_of_the_api(api, release):
    """With its own account and the calls of its role: a pod comes, falters, is deleted and goes; an engine is added."""
    ns = release.namespace
    objects = Chart().objects(ALONE, namespace=ns)
    engines = {"10.0.9.9": Sim("decode")}
    found = {m["labels"]["pdrelay/role"]: (m, spec) for _, m, spec in pods(objects) if "pdrelay/role" in m["labels"]}
    at = {"prefill": "10.0.0.1", "decode": "10.0.0.2"}
    for role, (meta, spec) in found.items():
        engines[at[role]] = Sim(role)
        run_pod(api, ns, role, meta, spec, at[role])
    engines["10.0.0.3"] = Sim("decode")

    async with serving_chart(objects, engines) as client:
        await until(client, {"10.0.0.1": "healthy", "10.0.0.2": "healthy"})
        run_pod(api, ns, "third", *found["decode"], "10.0.0.3")
        await until(client, {"10.0.0.1": "healthy", "10.0.0.2": "healthy", "10.0.0.3": "healthy"})
        be_ready(api, ns, "third", "False")
        await until(client, {"10.0.0.1": "healthy", "10.0.0.2": "healthy", "10.0.0.3": "drained"})
        be_ready(api, ns, "third", "True")
        await until(client, {"10.0.0.1": "healthy", "10.0.0.2": "healthy", "10.0.0.3": "healthy"})
        api.made("DELETE", api.path("v1", "Pod", ns, "third"))
        await until(client, {"10.0.0.1": "healthy", "10.0.0.2": "healthy", "10.0.0.3": "drained"})
        api.made("DELETE", api.path("v1", "Pod", ns, "third"), query={"gracePeriodSeconds": 0})
        await until(client, {"10.0.0.1": "healthy", "10.0.0.2": "healthy"})
        added = await client.post("/instances/add", json={"type": "decode", "instance": "10.0.9.9:80"})
        assert added.status_code == 200, added.text
        await asyncio.to_thread(release.upgrade, "helm4", ALONE | {"model": {"maxLength": 4096}})
        store = api.made("GET", api.path("v1", "ConfigMap", ns, "r-pdrelay-instances"))

    assert len(store["data"]) == 1


@pytest.mark.usefixtures("account")
async def test_an_entry_of_the_store_is_replaced_only_while_it_is_as_it_was():
    """With a router's own account: how the API answers a JSON patch whose test fails is its own business."""
    async with AsyncExitStack() as stack:
        heard = [Ear(), Ear()]
        stores = [
            ConfigMapStore(Kubernetes(Cluster.around()), "r-pdrelay-instances", ear, clock=time.monotonic)
            for ear in heard
        ]
        for store in stores:
            await stack.enter_async_context(store.running())
        await stores[0].put("decode.a", "1")
        assert not await stores[1].replace("decode.a", "0", "2")
        assert not await stores[1].replace("decode.a", "0", None)
        assert not await stores[1].replace("decode.never-there", "0", "1")
        assert await stores[1].replace("decode.a", "1", "2")
        assert not await stores[0].replace("decode.a", "1", "3")
        assert heard[0].entries == {"decode.a": "2"}
        assert await stores[0].replace("decode.a", "2", None)
        assert await stores[0].replace("decode.a", "2", None)  # it is as it was wanted
        assert heard[0].entries == {}

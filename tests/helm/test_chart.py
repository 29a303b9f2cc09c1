"""The chart as both helms render it, the way it is and with every file of ci/."""

import shutil
import tomllib

import pytest
import yaml

from pdrelay_proxy.cli import build_parser
from pdrelay_proxy.core.http.address_allowlist import STANDARD, AllowList
from pdrelay_proxy.core.http.origins import check_open
from pdrelay_proxy.options import serve_settings
from support.helm_care import ALL
from support.helm_chart import CASES, CI, HELMS, ROOT, Chart, default
from support.helm_checks import CHECKS
from support.helm_objects import COMPONENT, container, env, flag, ident, kind, pods, pool, router, templates
from support.helm_schemas import EACH_VERSION, wrong

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize("values", [None, *CI], ids=lambda path: path.stem if path else "default")
@pytest.mark.slow  # both helms read every example
def test_both_helms_find_nothing_to_complain_about(helm, values):
    """Helm 4 rejects what helm 3 passes."""
    assert "1 chart(s) linted, 0 chart(s) failed" in Chart().lint(ci=values, helm=helm)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow  # the same
def test_both_helms_make_the_same_objects(case):
    """Otherwise an upgrade with the other one would restart engines."""
    assert default(case, "helm3") == default(case, "helm4")


@pytest.mark.parametrize("version", EACH_VERSION)
@pytest.mark.parametrize("case", CASES)
def test_every_object_is_what_kubernetes_expects(case, version):
    """Strictly: an unknown field is an error, as a server-side apply makes it one."""
    assert [problem for o in default(case) for problem in wrong(o, version)] == []


@pytest.mark.parametrize("check", ALL.values(), ids=ALL)
@pytest.mark.parametrize("case", CASES)
def test_check(case, check):
    """See support/helm_checks.py and helm_care.py: each says what it is about."""
    assert check(default(case)) == []


@pytest.mark.parametrize("kind_", ["Deployment", "ScaledObject", "HTTPRoute", "PodMonitor", "LeaderWorkerSet"])
def test_the_schemas_are_strict(kind_):
    """A schema that lets everything through would find nothing above."""
    o = next(o for case in CASES for o in default(case) if o["kind"] == kind_)

    assert wrong(o, "1.33.0") == []
    assert wrong({**o, "spec": {**o["spec"], "replcias": 1}}, "1.33.0") != []


def test_the_files_of_ci_show_every_kind_of_object():
    """What no file renders, no test sees."""
    kinds = {o["kind"] for case in CASES for o in default(case)}

    crds = {
        "DisaggregatedSet",
        "HTTPRoute",
        "LeaderWorkerSet",
        "PodMonitor",
        "PrometheusRule",
        "ScaledObject",
        "ServiceMonitor",
    }
    core = {"ConfigMap", "Deployment", "HorizontalPodAutoscaler", "Ingress", "NetworkPolicy", "Pod", "Secret"}
    core |= {"Lease"}
    core |= {"PodDisruptionBudget", "Role", "RoleBinding", "Service", "ServiceAccount"}
    assert kinds == crds | core


def test_a_router_survives_another_and_an_engine_needs_no_permission():
    """By default there are two routers, and only they have a token."""
    objects = default()

    assert router(objects)["spec"]["replicas"] == 2
    assert {ident(o) for o, _, spec in pods(objects) if spec.get("automountServiceAccountToken")} == {
        "Deployment r-pdrelay-router"
    }


def test_who_is_autoscaled_has_no_number_of_replicas():
    """An upgrade would undo what the autoscaler has done."""
    objects = default("2p4d")

    assert len(kind(objects, "HorizontalPodAutoscaler")) == 2
    assert len(kind(objects, "ScaledObject")) == 1
    for workload in (router(objects), pool(objects, "prefill"), pool(objects, "decode")):
        assert "replicas" not in workload["spec"]


def test_a_new_chart_of_the_same_engines_restarts_no_engine(tmp_path):
    """Loading a model takes minutes: pods carry nothing that changes with the chart alone."""
    copied = tmp_path / "pdrelay"
    shutil.copytree(Chart().folder, copied)
    text = (copied / "Chart.yaml").read_text()
    (copied / "Chart.yaml").write_text(text.replace("\nversion: 0.1.0", "\nversion: 0.9.9"))

    old, new = (
        {ident(o): templates(o) for o in kind(objects, "Deployment")}
        for objects in (default(), Chart(copied).objects())
    )
    assert "0.9.9" in str(Chart(copied).objects())
    assert old == new


@pytest.mark.parametrize("kind_", ["Deployment", "LeaderWorkerSet"])
def test_each_pool_may_be_any_kind_of_workload(kind_):
    """And all checks hold."""
    objects = Chart().objects({"prefill": {"kind": kind_}, "decode": {"kind": kind_, "dataParallel": 4}})

    assert [problem for check in CHECKS.values() for problem in check(objects)] == []
    assert [problem for o in objects for problem in wrong(o, "1.33.0")] == []
    assert pool(objects, "decode")["kind"] == kind_


def test_a_pool_may_be_elsewhere():
    """Decode engines here, prefill engines named by their address."""
    values = {"prefill": {"enabled": False}, "router": {"discovery": {"prefill": ["http://p0:8100", "p1:8100#dp=4"]}}}
    objects = Chart().objects(values)

    assert [problem for o in objects for problem in wrong(o, "1.29.0")] == []
    assert {o["metadata"]["name"] for o in kind(objects, "Deployment")} == {"r-pdrelay-router", "r-pdrelay-decode"}
    assert CHECKS["router_args"](objects) == CHECKS["rbac"](objects) == CHECKS["names"](objects) == []


def test_a_router_without_kubernetes_rights_has_none():
    """Engines by address and a store in Redis: no Role, no token, no ConfigMap that routers write."""
    values = {
        "router": {
            "discovery": {"enabled": False, "prefill": ["p:1"], "decode": ["d:1"]},
            "store": {"type": "redis", "redisUrl": "redis://redis:6379/0"},
        }
    }
    objects = Chart().objects(values)

    assert kind(objects, "Role", "RoleBinding") == []
    assert CHECKS["rbac"](objects) == CHECKS["router_args"](objects) == []
    assert "redis://redis:6379/0?prefix=ns/r" in templates(router(objects))[0]["spec"]["containers"][0]["args"]
    assert templates(router(objects))[0]["spec"]["automountServiceAccountToken"] is False
    assert not [o for o in kind(objects, "ConfigMap") if o["metadata"]["name"].endswith("-instances")]


OPEN = {"router": {"allowUnauthenticated": True}}
OWN_HOSTS = ["r-pdrelay-router.ns", "r-pdrelay-router-admin.ns"]


@pytest.mark.parametrize(
    ("values", "is_open", "hosts"),
    [
        ({}, True, OWN_HOSTS),
        ({"router": {"apiKeys": {"secretName": "k"}}}, False, None),
        ({"router": {"tls": {"secretName": "t", "clientCaSecretName": "c"}}}, False, None),
        ({"router": {"tls": {"secretName": "t"}}}, True, None),
        ({"router": {"allowedHosts": ["a"], "apiKeys": {"secretName": "k"}}}, False, ["a"]),
        ({"ingress": {"enabled": True, "hosts": ["llm.example"]}} | OPEN, True, [*OWN_HOSTS, "llm.example"]),
        ({"httpRoute": {"enabled": True, "parentRefs": [{"name": "g"}]}} | OPEN, True, [*OWN_HOSTS, "*"]),
    ],
)
def test_a_router_is_open_only_where_the_values_have_no_keys(values, is_open, hosts):
    """And then it says so, and knows the names that are in front of it."""
    args = container(templates(router(Chart().objects(values)))[0])["args"]

    assert (flag(args, "--allow-unauthenticated") == "true") is is_open
    settings = serve_settings(build_parser(args).parse_args(args))
    assert settings.allowed_hosts == tuple(hosts or ())
    check_open(settings)


@pytest.mark.parametrize(
    ("given", "host", "place", "admitted"),
    [
        ({}, "10.1.2.3", "10.1.2.3", True),
        ({}, "d0.llm.svc.cluster.local", "8.34.12.7", True),
        ({}, "d0.llm.svc", "8.34.12.7", True),
        ({}, "d0.example.com", "8.34.12.7", False),
        ({}, "d0.llm.svc.cluster.local", "169.254.169.254", False),
        ({"allowedInstances": ["*.svc.k8s.corp"]}, "d0.llm.svc.k8s.corp", "8.34.12.7", True),
        ({"allowedInstances": ["*.svc.k8s.corp"]}, "10.1.2.3", "10.1.2.3", False),
        ({"allowedInstances": []}, "d0.llm.svc", "8.34.12.7", False),
        ({"allowedInstances": []}, "10.1.2.3", "10.1.2.3", True),
    ],
    ids=str,
)
def test_engines_may_be_added_where_the_cluster_is(given, host, place, admitted):
    """Its services may have public addresses (GKE's 34.118.224.0/20): then their names say that they are inside."""
    args = container(templates(router(Chart().objects({"router": given})))[0])["args"]
    settings = serve_settings(build_parser(args).parse_args(args))

    assert AllowList.parse(settings.allowed_instances).admits(host, place) is admitted


def test_the_chart_allows_what_a_router_allows_by_itself():
    """The names are more, and nothing is less."""
    values = yaml.safe_load((ROOT / "helm/pdrelay/values.yaml").read_text())

    assert values["router"]["allowedInstances"] == [*STANDARD, "*.svc", "*.svc.cluster.local"]


@pytest.mark.parametrize(("ports", "port"), [({}, 8081), ({"adminPort": 9000}, 9000)])
@pytest.mark.parametrize("tls", ["", "tls"])
def test_a_pod_knows_where_its_own_router_is(ports, port, tls, monkeypatch):
    """`kubectl exec POD -- pdrelay instances list` finds it at any port, and trusts the certificate it serves."""
    objects = Chart().objects({"router": {**ports, "tls": {"secretName": tls}}})
    template = templates(router(objects))[0]
    for name, one in env(template).items():
        monkeypatch.setenv(name, one.get("value", "of a secret"))
    asked = build_parser(argv := ["instances", "list"]).parse_args(argv)

    assert asked.router == f"http{'s' if tls else ''}://localhost:{port}"
    assert env(template).get("PDRELAY_ROUTER_PIN", {}).get("value") == flag(container(template)["args"], "--tls-cert")


@pytest.mark.parametrize(
    ("volume", "source", "cache"),
    [
        (
            {"type": "pvc", "claimName": "m"},
            {"persistentVolumeClaim": {"claimName": "m", "readOnly": True}},
            {"type": "pvc", "claimName": "c"},
        ),
        (
            {"type": "image", "image": "r/m:1"},
            {"image": {"reference": "r/m:1", "pullPolicy": "IfNotPresent"}},
            {"type": "emptyDir"},
        ),
        (
            {"type": "hostPath", "hostPath": "/srv/m"},
            {"hostPath": {"path": "/srv/m", "type": "Directory"}},
            {"type": "none"},
        ),
    ],
    ids=lambda one: one.get("type"),
)
def test_a_model_may_lie_on_any_kind_of_volume_beside_any_kind_of_cache(volume, source, cache):
    """It is mounted where its name says, nobody writes to it, and nothing is downloaded."""
    values = {"model": {"name": "/models/m", "volume": volume}, "cache": cache}
    objects = Chart().objects(values)

    assert [problem for check in CHECKS.values() for problem in check(objects)] == []
    assert [problem for o in objects for problem in wrong(o, "1.33.0")] == []
    for role in ("prefill", "decode"):
        template = templates(pool(objects, role))[0]
        assert {"name": "model", **source} in template["spec"]["volumes"]
        mount = {"name": "model", "mountPath": "/models", "readOnly": True}
        assert mount in container(template)["volumeMounts"]
        assert env(template)["HF_HUB_OFFLINE"]["value"] == "1"


def test_images_are_pulled_by_digest_and_with_secrets_if_they_have_them():
    """A digest wins over a tag, in the routers, both pools and the test."""
    digest = "sha256:" + "0" * 64
    image = {"image": {"repository": "registry.example.com/x", "tag": "9", "digest": digest}}
    values = {"router": image, "prefill": image, "decode": image, "imagePullSecrets": [{"name": "registry"}]}
    found = [spec for _, _, spec in pods(Chart().objects(values))]

    assert {c["image"] for spec in found for c in spec["containers"]} == {f"registry.example.com/x@{digest}"}
    assert [spec["imagePullSecrets"] for spec in found] == [[{"name": "registry"}]] * 4


def test_pods_are_spread_placed_and_ranked_as_the_values_say():
    """Each pool for itself; what the chart adds is the selector of its own pods."""
    spread = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule"}
    place = {
        "topologySpread": [spread], "priorityClassName": "high", "schedulerName": "s", "runtimeClassName": "nvidia",
        "colocate": {"enabled": True}, "nodeSelector": {"gpu": "h200"},
    }  # fmt: skip
    objects = Chart().objects({"prefill": place, "router": {"priorityClassName": "top", "topologySpread": [spread]}})
    spec, plain = (templates(pool(objects, role))[0]["spec"] for role in ("prefill", "decode"))

    assert [spec[key] for key in ("priorityClassName", "schedulerName", "runtimeClassName")] == ["high", "s", "nvidia"]
    assert spec["topologySpreadConstraints"][0] == spread | {
        "labelSelector": {"matchLabels": pool(objects, "prefill")["spec"]["selector"]["matchLabels"]}
    }
    (wish,) = spec["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert wish["podAffinityTerm"]["labelSelector"]["matchLabels"][COMPONENT] == "decode"
    assert templates(router(objects))[0]["spec"]["priorityClassName"] == "top"
    assert not {"priorityClassName", "affinity", "topologySpreadConstraints", "nodeSelector"} & plain.keys()
    assert CHECKS["selectors"](objects) == []


@pytest.mark.parametrize("tls", ["", "tls"])
def test_whoever_is_in_front_knows_what_the_router_speaks(tls):
    """A gateway that sends plain HTTP to a port of TLS gets 400 for everything."""
    (service,) = [
        o for o in kind(Chart().objects({"router": {"tls": {"secretName": tls}}}), "Service")
        if o["metadata"]["labels"][COMPONENT] == "router"
    ]  # fmt: skip

    assert service["spec"]["ports"][0]["appProtocol"] == ("https" if tls else "http")


def test_a_budget_never_keeps_what_is_not_ready():
    """A node could not be emptied of engines that load, or of routers that wait for them."""
    for o in kind(default("2p4d"), "PodDisruptionBudget"):
        assert o["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
        assert o["spec"]["maxUnavailable"] == 1


def test_prices_of_a_mode_are_in_its_preset():
    """RDMA: locked memory, huge pages and devices; hostNetwork: names of the cluster still resolve."""
    objects = default("hostnetwork-rdma")
    for role in ("prefill", "decode"):
        spec = templates(pool(objects, role))[0]["spec"]
        (c,) = spec["containers"]
        assert spec["dnsPolicy"] == "ClusterFirstWithHostNet"
        assert c["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
        assert c["resources"]["limits"]["nvidia.com/rdma"] == "1"
        assert c["resources"]["requests"]["hugepages-2Mi"] == c["resources"]["limits"]["hugepages-2Mi"]
        assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}} in spec["volumes"]
    assert (
        "add" not in templates(pool(default(), "decode"))[0]["spec"]["containers"][0]["securityContext"]["capabilities"]
    )


PRIVILEGED = {
    "eks",
    "hostnetwork-rdma",
    "rdma",
    "tp8-multinode",
}  # RDMA takes IPC_LOCK; and one has the node's network and disk


@pytest.mark.parametrize("case", CASES)
def test_a_namespace_of_the_restricted_standard_takes_all_that_needs_no_rdma(case):
    """Pod Security admission would refuse the engines of the others, and say so in an event that nobody reads."""
    found = set()
    for _, _, spec in pods(default(case)):
        found |= set() if spec["securityContext"].get("runAsNonRoot") else {"root"}
        found |= {"hostNetwork"} & spec.keys()
        found |= {"hostPath" for volume in spec.get("volumes", ()) if "hostPath" in volume}
        for c in (*spec["containers"], *spec.get("initContainers", ())):
            found |= set(c["securityContext"]["capabilities"].get("add", ()))
            found |= {"capabilities"} if c["securityContext"]["capabilities"]["drop"] != ["ALL"] else set()
            found |= {"privileges"} if c["securityContext"]["allowPrivilegeEscalation"] else set()

    assert bool(found) is (case in PRIVILEGED), found


def test_what_artifact_hub_shows_is_what_is_installed():
    """The versions of chart and project; no image, because none is published."""
    chart = yaml.safe_load((Chart().folder / "Chart.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert "artifacthub.io/images" not in chart["annotations"]
    assert chart["appVersion"] == project["version"]
    assert chart["annotations"]["artifacthub.io/license"] == project["license"]
    assert yaml.safe_load(chart["annotations"]["artifacthub.io/changes"])[0]["kind"] == "added"

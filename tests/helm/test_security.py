"""What keeps strangers from engines: their secret, their network, their user. See SECURITY.md."""

import base64
import importlib.util
import re
from pathlib import Path

import pytest
import yaml

from support.helm_chart import CHART, DRAWN, HELMS, LEAST, Chart, Refused, default, least_values, notes, run
from support.helm_checks import complaints
from support.helm_cluster import KUBE_SYSTEM, ROOT_CA, cluster
from support.helm_objects import COMPONENT, container, env, kind, one, pool, templates
from support.helm_schemas import wrong

pytestmark = pytest.mark.processes


ROLES = ("prefill", "decode")
OURS = {  # helm takes nothing that another release has made
    "name": "r-pdrelay-connector",
    "namespace": "ns",
    "labels": {"app.kubernetes.io/managed-by": "Helm"},
    "annotations": {"meta.helm.sh/release-name": "r", "meta.helm.sh/release-namespace": "ns"},
}
IMAGES = {key: value for key, value in LEAST.items() if key != "acceptDrawnSecrets"}


def secret_of(text):
    secrets = [o for o in yaml.safe_load_all(text) if o and o["kind"] == "Secret"]
    (found,) = [o for o in secrets if o["metadata"]["labels"][COMPONENT] == "engine"]
    return found


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({}, "connector.secret.name is empty, and helm does not see the cluster"),
        ({"connector": {"secret": {"name": "s"}}}, "router.peers.secret.name is empty, and helm does not see"),
        ({"connector": {"secret": {"name": "s"}}, "router": {"peers": {"secret": {"name": "p"}}}}, None),
        ({"connector": {"secret": {"name": "s"}}, "router": {"replicas": 1}}, None),
        ({"acceptDrawnSecrets": True}, None),
    ],
)
def test_a_tool_that_renders_without_a_cluster_draws_no_secret(values, sentence, helm):
    """Argo CD renders at each look: all pods of one rendering would refuse those of the one before."""
    chart = Chart(least=IMAGES)
    if sentence is None:
        assert chart.objects(values, helm=helm)
        return

    with pytest.raises(Refused, match=sentence):
        chart.objects(values, helm=helm)


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize(("there", "sees"), [([ROOT_CA], True), ([KUBE_SYSTEM], True), ([], False)])
def test_a_cluster_is_seen_also_from_a_new_namespace(there, sees, helm):
    """`--create-namespace` makes it after the rendering; a user with one namespace may not read others."""
    argv = ["template", "r", str(CHART), "-n", "ns", "--dry-run=server", "--disable-openapi-validation"]
    with least_values(IMAGES) as images, cluster({}, there) as address:
        if sees:
            assert secret_of(run(helm, *argv, *images, "--kube-apiserver", address))
            return
        with pytest.raises(Refused, match="does not see the cluster"):
            run(helm, *argv, *images, "--kube-apiserver", address)


def test_a_secret_is_there_without_being_asked_for():
    """The default is closed: 48 characters that no other installation has, and no engine has in its environment."""
    first, second = (secret_of(Chart().text()) for _ in range(2))
    (template,) = templates(pool(default(), "prefill"))

    assert len(base64.b64decode(first["data"]["secret"])) == 48
    assert first["data"] != second["data"]
    assert "PDRELAY_CONNECTOR_SECRET" not in env(template)
    assert env(template)["PDRELAY_CONNECTOR_SECRET_FILE"]["value"] == "/etc/pdrelay/connector/secret"


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize("there", [b"old", b"new\nold\n"], ids=["one line", "two lines"])
def test_an_upgrade_keeps_the_secret_of_the_cluster(helm, there):
    """Engines that start later would otherwise refuse those that run; and who rotates it has written a second line."""
    kept = {"secret": base64.b64encode(there).decode()}
    argv = ["template", "r", str(CHART), "-n", "ns", "--dry-run=server", "--disable-openapi-validation"]
    with least_values(IMAGES) as images:
        with cluster({("ns", "r-pdrelay-connector"): {"data": kept, "metadata": OURS}}, [ROOT_CA]) as address:
            found = secret_of(run(helm, *argv, *images, "--kube-apiserver", address))
        with cluster({}, [ROOT_CA]) as address:
            drawn = secret_of(run(helm, *argv, *images, "--kube-apiserver", address))

    assert found["data"] == kept
    assert len(base64.b64decode(drawn["data"]["secret"])) == 48


def test_another_key_in_the_secret_of_the_cluster_is_drawn():
    """Pods would wait for ever for a key that is not there; those of the old revision keep theirs."""
    kept = {"secret": base64.b64encode(b"old").decode()}
    argv = ["template", "r", str(CHART), "-n", "ns", "--dry-run=server", "--disable-openapi-validation"]
    there = {("ns", f"r-pdrelay-{name}"): {"data": kept, "metadata": OURS} for name in ("connector", "router-peers")}
    keys = ["--set", "connector.secret.key=k,router.peers.secret.key=k"]
    with least_values(IMAGES) as images, cluster(there, [ROOT_CA]) as address:
        text = run("helm4", *argv, *images, *keys, "--kube-apiserver", address)

    secrets = kind([o for o in yaml.safe_load_all(text) if o], "Secret")
    assert [(o["data"].keys(), o["data"]["secret"]) for o in secrets] == [({"k", "secret"}, kept["secret"])] * 2


def test_a_secret_of_ones_own_is_taken_and_none_is_made():
    """By its name and key; both pools mount it, and the workers of an engine, too."""
    values = {
        "connector": {"secret": {"name": "mine", "key": "k"}},
        "router": {"peers": {"secret": {"name": "theirs"}}},
    }
    objects = Chart().objects(values, ci="tp8-multinode")

    assert kind(objects, "Secret") == []
    for role in ROLES:
        for template in templates(pool(objects, role)):
            source = {"secretName": "mine", "items": [{"key": "k", "path": "secret"}]}
            assert {"name": "connector", "secret": source} in template["spec"]["volumes"]
    assert complaints(objects) == []


def test_engines_are_not_root():
    """They can write to their volumes, have a home and a name; all that the image's root has for them otherwise."""
    for role in ROLES:
        (template,) = templates(pool(default(), role))
        user = template["spec"]["securityContext"]
        assert (user["runAsNonRoot"], user["runAsUser"], user["fsGroup"]) == (True, 65532, 65532)
        assert env(template)["HOME"]["value"] == "/cache"
        assert env(template)["USER"]["value"] == "pdrelay"
    (template,) = templates(pool(Chart().objects({"cache": {"type": "none"}}), "decode"))
    assert env(template)["HOME"]["value"] == "/tmp"


WRITTEN = {  # what vLLM and the libraries below it keep files in, and where each of them would else be in HOME
    "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "HF_HOME", "TRITON_CACHE_DIR",
    "FLASHINFER_WORKSPACE_BASE", "CUDA_CACHE_PATH",
}  # fmt: skip


@pytest.mark.parametrize("cache", ["emptyDir", "none"])
@pytest.mark.parametrize(
    "user",
    [{}, {"podSecurityContext": dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"))}, {"runAsRoot": True}],
    ids=["the chart's", "anybody", "root"],
)
@pytest.mark.parametrize("helm", HELMS)
def test_engines_of_any_user_write_only_to_their_volumes(helm, user, cache):
    """OpenShift and the restricted standard give a user without a home, whose ~ is /."""
    closed = {**user, "securityContext": {"readOnlyRootFilesystem": True}}
    values = {"prefill": closed, "decode": closed, "cache": {"type": cache}}
    for role in ROLES:
        (template,) = templates(pool(Chart().objects(values, helm=helm), role))
        found = env(template)
        volumes = {v["name"]: v for v in template["spec"]["volumes"]}
        writable = [m["mountPath"] for m in container(template)["volumeMounts"] if "emptyDir" in volumes[m["name"]]]
        paths = {name: found[name]["value"] for name in (*WRITTEN, "HOME")}

        assert [n for n, path in paths.items() if not any(f"{path}/".startswith(f"{w}/") for w in writable)] == []
        if "podSecurityContext" in user:
            assert not {"runAsUser", "runAsGroup", "fsGroup"} & template["spec"]["securityContext"].keys()
            assert template["spec"]["securityContext"]["runAsNonRoot"] is True


def test_a_folder_of_ones_own_takes_the_place_of_the_charts():
    """Two variables of one name are a conflict to a server-side apply, which helm 4 makes."""
    own = {"name": "TRITON_CACHE_DIR", "value": "/fast/triton"}
    (template,) = templates(pool(Chart().objects({"decode": {"extraEnv": [own]}}), "decode"))

    assert [one for one in container(template)["env"] if one["name"] == own["name"]] == [own]


def test_vllm_knows_the_folders_it_is_given():
    """By its own list of environment variables."""
    folder = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])
    known = set(re.findall(r'^    "(VLLM_\w+)"', (folder / "envs.py").read_text(), re.MULTILINE))

    assert {name for name in WRITTEN if name.startswith("VLLM_")} <= known


@pytest.mark.parametrize("root", [False, True])
def test_engines_may_have_the_groups_of_a_device(root):
    """ROCm's belong to video and render; root without capabilities is subject to modes, too."""
    values = {"podSecurityContext": {"supplementalGroups": [44, 109]}, "runAsRoot": root}
    objects = Chart().objects({"prefill": values})
    user = templates(pool(objects, "prefill"))[0]["spec"]["securityContext"]

    assert user["supplementalGroups"] == [44, 109]
    assert user["runAsUser"] == (0 if root else 65532)


@pytest.mark.parametrize(
    ("pool_values", "root"),
    [
        ({"runAsRoot": True}, True),
        ({"rdma": {"enabled": True}}, True),
        ({"rdma": {"enabled": True}, "runAsRoot": False}, False),
    ],
    ids=str,
)
def test_an_engine_is_root_for_rdma_or_by_its_value(pool_values, root):
    """IPC_LOCK reaches no other user; where the runtime lets all users lock memory, `runAsRoot: false` works."""
    objects = Chart().objects({"decode": pool_values})
    template, other = (templates(pool(objects, role))[0] for role in ("decode", "prefill"))
    user = template["spec"]["securityContext"]

    assert user["runAsUser"] == (0 if root else 65532)
    assert user["runAsNonRoot"] is not root
    assert user["seccompProfile"] == {"type": "RuntimeDefault"}
    assert ("HOME" in env(template), "fsGroup" in user) == (not root, not root)
    assert other["spec"]["securityContext"]["runAsUser"] == 65532
    assert [problem for o in objects for problem in wrong(o, "1.33.0")] == []


def test_rdma_leaves_tcp_out():
    """Over TCP no key of the NIC is asked for: an engine with RDMA has no such transport, unless its value is empty."""
    rdma = {"rdma": {"enabled": True}}
    template = templates(pool(Chart().objects({"prefill": rdma}), "prefill"))[0]
    chosen = {"rdma": {"enabled": True, "transports": "", "devices": "mlx5_0:1"}}
    other = templates(pool(Chart().objects({"prefill": chosen}), "prefill"))[0]

    assert "tcp" not in env(template)["UCX_TLS"]["value"].split(",")
    assert env(template)["UCX_TLS"]["value"].split(",")[0] == "rc"
    assert "UCX_NET_DEVICES" not in env(template)  # the connector chooses, and refuses "all"
    assert env(other)["UCX_NET_DEVICES"]["value"] == "mlx5_0:1"
    assert "UCX_TLS" not in env(other)
    assert not {"UCX_TLS", "UCX_NET_DEVICES"} & env(templates(pool(default(), "decode"))[0]).keys()


def test_kv_events_are_for_those_who_are_named():
    """vLLM's publisher asks for no key, so the port is the engines' alone until `kvEvents.from` names more."""
    events = {"kvEvents": {"enabled": True}, "dataParallel": 2}
    peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "indexer"}}}
    closed, opened = (
        one(
            Chart().objects({"decode": events | {"kvEvents": {"enabled": True, "from": names}}}),
            "NetworkPolicy",
            "r-pdrelay-decode",
        )
        for names in ([], [peer])
    )
    ports = [{"port": "kv-events-0"}, {"port": "kv-events-1"}]

    assert "kv-events" not in str(closed["spec"]["ingress"])
    assert {"ports": ports, "from": [peer]} in opened["spec"]["ingress"]
    objects = Chart().objects({"decode": events | {"kvEvents": {"enabled": True, "from": [peer]}}})
    assert complaints(objects) == []
    assert [port["name"] for port in container(templates(pool(objects, "decode"))[0])["ports"]][-2:] == [
        "kv-events-0", "kv-events-1",
    ]  # fmt: skip


def test_names_are_resolved_where_egress_is_closed():
    """By the cluster's DNS, whose pods OpenShift calls otherwise and gives another port."""
    locked = {"networkPolicy": {"egress": {"enabled": True, "engineTo": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}}}
    found = kind(Chart().objects(locked), "NetworkPolicy")

    assert len(found) == 3
    for o in found:
        named = {
            (next(iter(peer["podSelector"]["matchLabels"])), port["port"], port["protocol"])
            for rule in o["spec"]["egress"]
            for peer in rule.get("to", ())
            for port in rule.get("ports", ())
            if "namespaceSelector" in peer
        }
        assert named == {
            (label, port, protocol)
            for label, port in (("k8s-app", 53), ("dns.operator.openshift.io/daemonset-dns", 5353))
            for protocol in ("UDP", "TCP")
        }


def test_an_open_data_plane_is_accepted_in_words():
    """And the notes repeat them at the installation."""
    accepted = ["--set", "connector.acceptOpenDataPlane=true,prefill.hostNetwork=true"]
    said = notes(*accepted)

    assert "The engines' data plane is not closed by this chart" in said
    assert "reads and writes its memory" in said


def test_policies_are_made_unless_the_open_data_plane_is_accepted():
    """One for the routers, one for each pool."""
    policies = kind(default(), "NetworkPolicy")
    without = {"networkPolicy": {"enabled": False}, "connector": {"acceptOpenDataPlane": True}}

    assert {o["metadata"]["labels"][COMPONENT] for o in policies} == {"router", *ROLES}
    assert kind(Chart().objects(without), "NetworkPolicy") == []
    assert [o["data"] for o in kind(default(), "Secret")] == [{"secret": DRAWN}] * 2  # of engines, and of routers

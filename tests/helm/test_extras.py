"""What sites add to pods and releases: containers before the engine, claims of devices, names, objects of their own."""

import pytest
import yaml

from support.helm_care import all_complaints
from support.helm_chart import CHART, HELMS, Chart, least_values, run
from support.helm_objects import container, env, flag, ident, kind, one, pool, router, templates
from support.helm_schemas import wrong

pytestmark = pytest.mark.processes


COPY = {
    "name": "copy",
    "image": "registry.example.com/tools:1",
    "command": ["cp", "-r", "/from", "/cache/m"],
    "volumeMounts": [{"name": "cache", "mountPath": "/cache"}],
}
GPU = {"name": "gpu", "resourceClaimTemplateName": "h200", "request": "gpus"}
RDMA = {"name": "rdma", "resourceClaimName": "nics"}


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize("own", [{}, {"runAsUser": 7, "allowPrivilegeEscalation": False}], ids=["none", "own"])
def test_a_container_runs_before_the_engine_and_is_as_restricted(own, helm):
    """Unless it has a securityContext of its own; beside it is the one that the chart may have."""
    more = COPY | ({"securityContext": own} if own else {})
    keyed = {"apiKey": {"secretName": "engines"}}
    values = {"kvEvents": {"enabled": True}, "prefill": keyed, "decode": keyed | {"initContainers": [more]}}
    objects = Chart().objects(values, helm=helm)
    (template,) = templates(pool(objects, "decode"))
    first, second = template["spec"]["initContainers"]

    assert first["name"] == "kv-events"
    assert second == more | {"securityContext": own or container(template)["securityContext"]}
    assert len(templates(pool(objects, "prefill"))[0]["spec"]["initContainers"]) == 1
    assert all_complaints(objects) + [problem for o in objects for problem in wrong(o, "1.33.0")] == []


@pytest.mark.parametrize("version", ["1.33.0", "1.37.0"])
@pytest.mark.parametrize("kind_", ["Deployment", "LeaderWorkerSet"])
def test_devices_may_be_claimed(kind_, version):
    """By every pod of an engine, and by its container; no resource of a device plugin is asked for beside them."""
    claims = {"resourceClaims": [GPU, RDMA], "accelerator": {"resource": ""}, "kind": kind_}
    objects = Chart().objects({"decode": claims})
    for template in templates(pool(objects, "decode")):
        plain = {"name": "gpu", "resourceClaimTemplateName": "h200"}
        assert template["spec"]["resourceClaims"] == [plain, RDMA]
        resources = container(template)["resources"]
        assert resources["claims"] == [{"name": "gpu", "request": "gpus"}, {"name": "rdma"}]
        assert resources["limits"] == {}

    assert "claims" not in container(templates(pool(objects, "prefill"))[0])["resources"]
    assert all_complaints(objects) + [problem for o in objects for problem in wrong(o, version)] == []


def test_a_rollout_waits_for_pods_that_stay_ready():
    """Of routers and pools, each its own time; the deadline of a rollout is so much later."""
    values = {
        "router": {"minReadySeconds": 10},
        "prefill": {"minReadySeconds": 60},
        "decode": {"minReadySeconds": 30},
    }
    plain, objects = Chart().objects(), Chart().objects(values)
    prefill = pool(objects, "prefill")["spec"]

    assert router(objects)["spec"]["minReadySeconds"] == 10
    assert (prefill["minReadySeconds"], pool(objects, "decode")["spec"]["minReadySeconds"]) == (60, 30)
    assert prefill["progressDeadlineSeconds"] == pool(plain, "prefill")["spec"]["progressDeadlineSeconds"] + 60
    assert "minReadySeconds" not in pool(plain, "prefill")["spec"]
    assert [problem for o in objects for problem in wrong(o, "1.29.0")] == []


def test_a_model_may_have_more_names():
    """vLLM's metrics have the first, which is what KEDA asks for and `helm test` uses."""
    values = {"model": {"name": "org/new", "servedName": "new", "aliases": ["old", "chat"]}}
    values |= {"decode": {"autoscaling": {"type": "keda"}}, "monitoring": {"podMonitor": {"enabled": True}}}
    objects = Chart().objects(values)
    args = container(templates(pool(objects, "decode"))[0])["args"]
    (scaled,) = kind(objects, "ScaledObject")
    (test,) = kind(objects, "Pod")

    start = args.index("--served-model-name")
    assert args[start : start + 5] == ["--served-model-name", "new", "old", "chat", "--host"]
    assert 'model_name="new"' in scaled["spec"]["triggers"][0]["metadata"]["query"]
    assert "--model=new" in container(test)["args"]


@pytest.mark.parametrize("helm", HELMS)
def test_the_other_models_of_a_site_are_installed_by_the_command_beside_the_example(helm):
    """They share neither objects nor the host that the gateway tells them apart by."""
    path = CHART / "ci" / "several-models-values.yaml"
    command = path.read_text().split("# others: ")[1].splitlines()[0]
    (changed,) = command.split("--set ")[1:]
    argv = ["template", "other", str(CHART), "-n", "ns", "-f", str(path), "--set", changed]
    with least_values() as least:
        other = [o for o in yaml.safe_load_all(run(helm, *argv, *least)) if o]
    first = Chart().objects(ci="several-models", helm=helm)

    assert command.startswith("helm -n llm upgrade --install OTHER helm/pdrelay -f these.yaml")
    assert not {ident(o) for o in first} & {ident(o) for o in other}
    hosts = [kind(objects, "HTTPRoute")[0]["spec"]["hostnames"] for objects in (first, other)]
    assert hosts == [["qwen.llm.example.com"], ["other.llm.example.com"]]
    assert flag(container(templates(pool(other, "decode"))[0])["args"], "--served-model-name") == "other"


def test_objects_of_ones_own_belong_to_the_release_as_they_are():
    """Braces in them are theirs: they are no template of helm's."""
    alert = {"summary": "{{ $labels.pod }} is slow"}
    own = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "mine", "labels": {"a": "b"}}, "data": alert}
    objects = Chart().objects({"extraObjects": [own, {**own, "metadata": {"name": "other"}}]})

    assert one(objects, "ConfigMap", "mine") == own
    assert one(objects, "ConfigMap", "other")["data"] == alert
    assert env(templates(pool(objects, "decode"))[0])  # and the chart's own are there

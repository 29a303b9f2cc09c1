"""How many pods an upgrade leaves: as many as run, unless their number is what was changed."""

import pytest
import yaml

from support.helm_chart import CHART, HELMS, Chart, least_values, run
from support.helm_cluster import ROOT_CA, cluster
from support.helm_objects import pool, router

pytestmark = pytest.mark.processes


API = {"LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1"}
HPA = {"type": "hpa", "min": 6, "max": 12}
KEDA = {"type": "keda", "min": 6, "max": 12}


def live(component, replicas, kind="Deployment", noted=None):
    """Return a workload of the release as the cluster has it, with the number that its last upgrade wrote down."""
    meta = {
        "name": f"r-pdrelay-{component}",
        "namespace": "ns",
        "labels": {"app.kubernetes.io/managed-by": "Helm"},
        "annotations": {"meta.helm.sh/release-name": "r", "meta.helm.sh/release-namespace": "ns"},
    }
    if noted is not None:
        meta["annotations"]["pdrelay/replicas"] = str(noted)
    return {
        "apiVersion": API.get(kind, "apps/v1"),
        "kind": kind,
        "metadata": meta,
        "spec": {"replicas": replicas},
    }


def upgraded(helm, values, *there, new=False):
    """Return what an upgrade (or an installation) renders where these objects are."""
    argv = ["template", "r", str(CHART), "-n", "ns", "--dry-run=server", "--disable-openapi-validation"]
    with cluster({}, [ROOT_CA, *there]) as address, least_values() as least:
        upgrade = () if new else ("--is-upgrade",)
        text = run(helm, *argv, *least, "-f", "-", *upgrade, "--kube-apiserver", address, stdin=yaml.safe_dump(values))
    return [o for o in yaml.safe_load_all(text) if o]


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize("autoscaling", [HPA, KEDA], ids=["hpa", "keda"])
@pytest.mark.parametrize("kind", ["Deployment", "LeaderWorkerSet"])
def test_switching_on_autoscaling_keeps_the_engines_that_run(kind, autoscaling, helm):
    """A number that is left out is 1 to the API: all engines but one would end, and load their models again."""
    values = {"decode": {"kind": kind, "replicas": 6, "autoscaling": autoscaling}}
    values["prefill"] = {"kind": kind, "replicas": 3, "autoscaling": autoscaling}
    values["monitoring"] = {"podMonitor": {"enabled": True}}
    objects = upgraded(helm, values, live("decode", 7, kind, noted=6), live("prefill", 9, kind))

    assert pool(objects, "decode")["spec"]["replicas"] == 7
    assert pool(objects, "prefill")["spec"]["replicas"] == 9


@pytest.mark.parametrize("helm", HELMS)
def test_switching_on_autoscaling_keeps_the_routers_that_run(helm):
    """Those that have gone would have streams."""
    values = {"router": {"replicas": 3, "autoscaling": {"type": "hpa", "min": 2, "max": 9}}}

    assert router(upgraded(helm, values, live("router", 5)))["spec"]["replicas"] == 5


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize("new", [True, False], ids=["installation", "upgrade"])
def test_an_autoscaled_pool_that_is_new_begins_with_what_the_values_say(new, helm):
    """The larger of the two numbers."""
    values = {role: {"replicas": n, "autoscaling": HPA} for role, n in (("prefill", 8), ("decode", 1))}
    objects = upgraded(helm, values, new=new)

    assert [pool(objects, role)["spec"]["replicas"] for role in ("prefill", "decode")] == [8, 6]


def test_what_is_rendered_without_a_cluster_leaves_the_number_to_the_autoscaler():
    """A GitOps tool renders again and again, and each time would undo what the autoscaler has done."""
    objects = Chart().objects({"router": {"autoscaling": {"type": "hpa"}}, "decode": {"autoscaling": HPA}})

    assert "replicas" not in router(objects)["spec"]
    assert "replicas" not in pool(objects, "decode")["spec"]
    assert pool(objects, "prefill")["spec"]["replicas"] == 1


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize(
    ("noted", "says", "running", "kept"),
    [
        (4, 4, 3, 3),  # kubectl scale, and nobody changed the value: helm 4 would report a conflict
        (4, 6, 3, 6),  # the value was changed since
        (4, 4, 4, 4),
        (4, 4, 0, 0),  # stopped on purpose
        (None, 4, 3, 4),  # a chart that wrote nothing down
    ],
)
def test_who_was_scaled_by_hand_keeps_its_number_until_the_value_changes(noted, says, running, kept, helm):
    """`kubectl scale` owns the field then; the same number is no conflict with it."""
    objects = upgraded(helm, {"decode": {"replicas": says}}, live("decode", running, noted=noted))

    workload = pool(objects, "decode")
    assert workload["spec"]["replicas"] == kept
    assert workload["metadata"]["annotations"]["pdrelay/replicas"] == str(says)


@pytest.mark.parametrize("helm", HELMS)
def test_switching_off_autoscaling_keeps_the_engines_that_run(helm):
    """Until somebody writes another number."""
    running = live("decode", 9, noted=4)

    assert pool(upgraded(helm, {"decode": {"replicas": 4}}, running), "decode")["spec"]["replicas"] == 9
    assert pool(upgraded(helm, {"decode": {"replicas": 5}}, running), "decode")["spec"]["replicas"] == 5

"""Both pools as one DisaggregatedSet: what its controller makes of it is what the chart makes without it."""

import functools

import pytest
import yaml

from support.helm_chart import CHART, HELMS, LEAST, Chart, Refused, default, run
from support.helm_checks import complaints
from support.helm_cluster import cluster
from support.helm_objects import COMPONENT, WORKLOADS, as_controller, container, flag, kind, pods, router, templates
from support.helm_schemas import wrong

pytestmark = pytest.mark.processes


SET = {"disaggregatedSet": {"enabled": True}}
NAME = "n" * 30  # the longest
ALONE = {role: {"autoscaling": {"type": "none"}} for role in ("prefill", "decode")}


@pytest.mark.parametrize("helm", HELMS)
def test_its_roles_are_the_two_pools_as_they_would_be_without_it(helm):
    """Every check holds for them, and pods are the same: discovery, policies, budgets and services find them."""
    plain = Chart().objects({**ALONE, "fullnameOverride": NAME}, ci="tp8-multinode", helm=helm)
    objects = Chart().objects({**ALONE, **SET, "fullnameOverride": NAME}, ci="tp8-multinode", helm=helm)
    made = as_controller(objects)

    assert [problem for o in (*objects, *made) for problem in wrong(o, "1.33.0")] == []
    assert complaints(made) == []
    assert not kind(objects, *WORKLOADS[1:])
    for role in ("prefill", "decode"):
        assert [(m, s) for o, m, s in pods(made) if m["labels"][COMPONENT] == role] == [
            (m, s) for o, m, s in pods(plain) if m["labels"][COMPONENT] == role
        ]
    roles = {role["name"]: role for role in kind(objects, "DisaggregatedSet")[0]["spec"]["roles"]}
    assert {name: role["spec"]["replicas"] for name, role in roles.items()} == {"prefill": 2, "decode": 2}
    place = {"leaderworkerset.sigs.k8s.io/exclusive-topology": "cloud.provider.com/rack"}
    assert (roles["prefill"]["metadata"]["annotations"], "annotations" in roles["decode"]["metadata"]) == (place, False)


def test_nobody_gets_one_who_has_not_asked():
    """Its operator need not be there."""
    assert not kind(default("tp8-multinode"), "DisaggregatedSet")


LWS = {"kind": "LeaderWorkerSet"}
SCALED = {
    "prefill": {**LWS, "replicas": 3, "autoscaling": {"type": "keda"}},
    "decode": {**LWS, "replicas": 2},
    "monitoring": {"podMonitor": {"enabled": True}},
}


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize(("autoscaler", "kind_"), [("hpa", "HorizontalPodAutoscaler"), ("keda", "ScaledObject")])
def test_a_role_is_scaled_by_the_scaler_that_the_controller_makes_of_it(autoscaler, kind_, helm):
    """It begins with the engines that run, so the role itself has no number; the other role keeps its own."""
    values = SCALED | SET | {"prefill": {**SCALED["prefill"], "autoscaling": {"type": autoscaler}}}
    objects = Chart().objects(values, helm=helm)
    (whole,), (scaler,) = kind(objects, "DisaggregatedSet"), kind(objects, kind_)
    prefill, decode = whole["spec"]["roles"]

    assert scaler["spec"]["scaleTargetRef"] == {
        "apiVersion": "disaggregatedset.x-k8s.io/v1",
        "kind": "DisaggregatedSetRoleScaler",
        "name": f"{whole['metadata']['name']}-prefill",
    }
    assert (prefill["scaling"], "replicas" in prefill["spec"]) == ({"mode": "External"}, False)
    assert ("scaling" in decode, decode["spec"]["replicas"]) == (False, 2)
    assert [problem for o in objects for problem in wrong(o, "1.33.0")] == []


COPIED = {"slices": 3, "placementPolicy": {"type": "ExclusiveTopology", "topology": "example.com/rack"}}
SLICED = {"disaggregatedSet": {"enabled": True, **COPIED}}
COPIES = {"prefill": LWS, "decode": {**LWS, "replicas": 2}}


def test_slices_are_copies_whose_engines_the_router_pairs():
    """The fields are there only when asked for, because LeaderWorkerSet 0.9 has none; routers go by its own label."""
    one, own = (
        Chart().objects(COPIES | more) for more in (SET, {**SLICED, "router": {"settings": {"slice_pairing": "off"}}})
    )
    objects = Chart().objects(COPIES | SLICED)
    spec, plain = (kind(found, "DisaggregatedSet")[0]["spec"] for found in (objects, one))

    assert (spec["slices"], spec["placementPolicy"]) == (3, COPIED["placementPolicy"])
    assert not {"slices", "placementPolicy"} & plain.keys()
    assert [role["spec"]["replicas"] for role in spec["roles"]] == [1, 2]  # of each slice
    found = [container(templates(router(of))[0])["args"] for of in (objects, own, one)]
    assert [flag(args, "--slice-pairing") for args in found] == ["prefer", "off", None]
    assert flag(found[0], "--slice-label") == "disaggregatedset.x-k8s.io/slice"


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize("lacking", [(), ("DisaggregatedSetRoleScaler",)], ids=["newer", "0.9"])
def test_a_controller_that_makes_no_scalers_is_noticed(lacking, helm, tmp_path, monkeypatch):
    """LeaderWorkerSet 0.9 would drop the field, and have one engine of a role without a number."""
    monkeypatch.setenv("KUBECACHEDIR", str(tmp_path))  # what another cluster at this port had
    least = tmp_path / "least.yaml"
    least.write_text(yaml.safe_dump(LEAST))
    argv = ["install", "r", str(CHART), "-n", "ns", "--dry-run=server", "--disable-openapi-validation"]
    argv += ["-f", str(least), "-f", "-"]
    with cluster({}, lacking=lacking) as address:
        rendered = functools.partial(run, helm, *argv, "--kube-apiserver", address, stdin=yaml.safe_dump(SCALED | SET))
        if not lacking:
            assert "mode: External" in rendered()
            return
        with pytest.raises(Refused, match=r"a LeaderWorkerSet newer than 0\.9"):
            rendered()


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize("length", [22, 23, 28, 29, 40, 53])
def test_a_long_release_is_told_that_its_pods_would_have_too_long_names(length, helm):
    """Its name is that of the set, of its LeaderWorkerSets, and of what these make; a label has 63 characters."""
    chart = Chart()
    release = "r" * length
    values = SET | {"prefill": LWS, "decode": LWS}
    if length > 22:
        with pytest.raises(Refused, match="more than 30 characters: pods would be called by too long names"):
            chart.text(values, release=release, helm=helm)
        values |= {"fullnameOverride": NAME}

    objects = as_controller(chart.objects(values, release=release, helm=helm))
    assert [problem for o in objects for problem in wrong(o, "1.33.0")] == []
    assert complaints(objects) == []


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"prefill": LWS}, "write decode.enabled: true and decode.kind: LeaderWorkerSet"),
        ({"prefill": LWS, "decode": {**LWS, "enabled": False}}, "write decode.enabled: true"),
        (
            {"prefill": LWS, "decode": {**LWS, "strategy": {"rollingUpdateConfiguration": {"partition": 1}}}},
            "decode.strategy: a DisaggregatedSet takes RollingUpdate without a partition",
        ),
        ({"prefill": LWS, "decode": LWS, "fullnameOverride": "n" * 31}, "write a shorter fullnameOverride"),
        (
            COPIES | {"fullnameOverride": "n" * 30, "disaggregatedSet": {"enabled": True, "slices": 11}},
            "than 29 characters",
        ),
        ({"disaggregatedSet": COPIED}, "disaggregatedSet.slices is 3: write disaggregatedSet.enabled: true"),
        (
            COPIES | {"disaggregatedSet": {"enabled": True, "placementPolicy": {"type": "ExclusiveTopology"}}},
            "disaggregatedSet.placementPolicy.type is ExclusiveTopology: name the label of nodes",
        ),
        (
            COPIES | SLICED | {"decode": {**LWS, "autoscaling": {"type": "hpa", "min": 6}}},
            "decode.autoscaling.type is hpa: the controller scales no set of several slices, and there are 3",
        ),
    ],
    ids=lambda one: str(one)[:50],
)
def test_what_its_controller_would_refuse_is_refused_before(values, sentence):
    """In a sentence that names the value."""
    with pytest.raises(Refused) as refusal:
        Chart().text(SET | values)

    assert sentence in str(refusal.value)

"""Values of `engine` are those of both pools; what a pool says itself takes their place."""

import pytest
import yaml

from support.helm_chart import CHART, HELMS, Chart, Refused
from support.helm_objects import container, flag, pool, templates

ROLES = ("prefill", "decode")


def of_roles(objects):
    return {role: templates(pool(objects, role))[0]["spec"] for role in ROLES}


@pytest.mark.parametrize("helm", HELMS)
def test_both_pools_have_a_value_of_engine(helm):
    """A value written once needs no anchor of YAML."""
    both = {"tensorParallel": 2, "extraArgs": ["--enforce-eager"], "nodeSelector": {"pool": "gpu"}}

    once = Chart().objects({"engine": both}, helm=helm)

    assert once == Chart().objects({"prefill": both, "decode": both}, helm=helm)


@pytest.mark.parametrize("helm", HELMS)
def test_a_pool_replaces_a_value_of_engine_key_by_key(helm):
    """Also by 0, false and an empty text, and a list by a list."""
    values = {
        "engine": {
            "tensorParallel": 4,
            "expertParallel": True,
            "runtimeClassName": "nvidia",
            "extraArgs": ["--enforce-eager"],
            "resources": {"requests": {"cpu": "8"}},
        },
        "decode": {
            "expertParallel": False,
            "runtimeClassName": "",
            "extraArgs": ["--seed", "1"],
            "accelerator": {"count": 0},
            "resources": {"requests": {"memory": "1Gi"}},
        },
    }
    specs = of_roles(Chart().objects(values, helm=helm))
    prefill, decode = (container({"spec": specs[role]}) for role in ROLES)

    assert [flag(one["args"], "--tensor-parallel-size") for one in (prefill, decode)] == ["4", "4"]
    assert ["--enable-expert-parallel" in one["args"] for one in (prefill, decode)] == [True, False]
    assert ["--enforce-eager" in one["args"] for one in (prefill, decode)] == [True, False]
    assert [specs[role].get("runtimeClassName") for role in ROLES] == ["nvidia", None]
    assert [one["resources"]["limits"] for one in (prefill, decode)] == [{"nvidia.com/gpu": "4"}, {}]
    assert decode["resources"]["requests"] | {"cpu": "8", "memory": "1Gi"} == decode["resources"]["requests"]


@pytest.mark.parametrize("helm", HELMS)
def test_a_null_of_a_pool_takes_the_value_away_from_it_alone(helm):
    """OpenShift chooses users itself; helm alone would keep the null beside no default."""
    specs = of_roles(Chart().objects({"decode": {"podSecurityContext": {"runAsUser": None}}}, helm=helm))

    assert specs["prefill"]["securityContext"]["runAsUser"] == 65532
    assert "runAsUser" not in specs["decode"]["securityContext"]


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("port", 9),
        ("sidePort", 9),
        ("enabled", False),
        ("drain", {"requestSeconds": 9}),
        ("autoscaling", {"metric": "m"}),
        ("kvEvents", {"port": 9}),
    ],
)
def test_a_value_that_each_pool_has_is_refused_in_engine(key, value, helm):
    """It would do nothing there: the pools' own defaults take its place."""
    with pytest.raises(Refused, match="engine"):
        Chart().objects({"engine": {key: value}}, helm=helm)


def test_pools_have_defaults_only_where_they_differ():
    """The same default twice would keep a value of engine from one of them."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def leaves(of, path=()):
        for key, value in of.items():
            yield from leaves(value, (*path, key)) if isinstance(value, dict) else [((*path, key), value)]

    same = set(leaves(values["prefill"])) & set(leaves(values["decode"]))

    assert same == {(("enabled",), True)}

"""Values of `engine` are those of both pools; what a pool says itself takes their place."""

import pytest
import yaml

from support.helm_chart import CHART, HELMS, Chart, Refused
from support.helm_objects import container, flag, pool, router, templates

pytestmark = pytest.mark.processes


ROLES = ("prefill", "decode")


def of_roles(objects):
    return {role: templates(pool(objects, role))[0]["spec"] for role in ROLES}


@pytest.mark.parametrize("helm", HELMS)
def test_a_pool_takes_a_key_of_both_pools_away(helm):
    """A label of nodes that one of them has not; null in the values of both is nothing."""
    values = {
        "engine": {
            "nodeSelector": {"gpu": "h100", "zone": "a"},
            "podLabels": {"tier": "x", "none": None},
            "podAnnotations": {"note": "y"},
        },
        "prefill": {"nodeSelector": {"gpu": None}, "podLabels": {"tier": None}, "podAnnotations": {"note": None}},
    }
    objects = Chart().objects(values, helm=helm)
    (prefill,), (decode,) = (templates(pool(objects, role)) for role in ("prefill", "decode"))

    assert prefill["spec"]["nodeSelector"] == {"zone": "a"}
    assert decode["spec"]["nodeSelector"] == {"gpu": "h100", "zone": "a"}
    assert "tier" not in prefill["metadata"]["labels"]
    assert decode["metadata"]["labels"]["tier"] == "x"
    assert "none" not in decode["metadata"]["labels"]
    assert "note" not in prefill["metadata"]["annotations"]
    assert decode["metadata"]["annotations"]["note"] == "y"


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


@pytest.mark.parametrize("helm", HELMS)
def test_engines_and_routers_fetch_media_from_the_same_hosts(helm):
    """Engines are inside the closed network; an allowed host could send them anywhere else."""
    domains = ["images.example.com", "cdn.example.com"]
    objects = Chart().objects({"model": {"allowedMediaDomains": domains}}, helm=helm)
    engines = [container(templates(pool(objects, role))[0]) for role in ROLES]

    for one in (*engines, container(templates(router(objects))[0])):
        start = one["args"].index("--allowed-media-domains") + 1
        assert one["args"][start : start + 2] == domains
    for one in engines:
        assert {"name": "VLLM_MEDIA_URL_ALLOW_REDIRECTS", "value": "0"} in one["env"]


def test_any_host_is_no_list_for_engines():
    """vLLM knows no star: it would look for a host of that name."""
    objects = Chart().objects({"model": {"allowedMediaDomains": ["*"]}})

    assert "--allowed-media-domains" in container(templates(router(objects))[0])["args"]
    assert "--allowed-media-domains" not in container(templates(pool(objects, "decode"))[0])["args"]


@pytest.mark.parametrize("helm", HELMS)
def test_pods_of_one_node_may_share_its_namespaces(helm):
    """UCX opens the memory of another GPU only within one PID namespace; nobody gets that without asking."""
    shared = of_roles(Chart().objects({"engine": {"hostNamespaces": True}}, helm=helm))
    usual = of_roles(Chart().objects(helm=helm))

    assert [(spec["hostPID"], spec["hostIPC"]) for spec in shared.values()] == [(True, True)] * 2
    assert [key for spec in usual.values() for key in ("hostPID", "hostIPC") if key in spec] == []


@pytest.mark.parametrize("helm", HELMS)
def test_routers_read_the_keys_of_operators_and_engines_from_files(helm):
    """The kubelet renews a file; an environment stays as it was until the pod ends."""
    keys = {"engine": {"apiKey": {"secretName": "e"}}, "router": {"adminKey": {"secretName": "a"}}}
    (template,) = templates(router(Chart().objects(keys, helm=helm)))
    one = container(template)
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in one["volumeMounts"]}

    for name, secret in (("admin", "a"), ("prefill-api", "e"), ("decode-api", "e")):
        folder = flag(one["args"], f"--{name}-key-file").removesuffix("/key")
        assert mounts[folder]["secret"]["secretName"] == secret
    assert [entry["name"] for entry in one["env"] if entry["name"].endswith("FILL_API_KEY")] == []


def test_engines_take_two_keys_while_one_takes_the_place_of_the_other():
    """Routers send one of them, and not at the moment in which an engine starts."""
    objects = Chart().objects({"engine": {"apiKey": {"secretName": "e", "nextKey": "next"}}})
    for role in ROLES:
        one = container(templates(pool(objects, role))[0])
        start = one["args"].index("--api-key") + 1
        variables = [argument[2:-1] for argument in one["args"][start : start + 2]]
        found = {
            entry["name"]: entry["valueFrom"]["secretKeyRef"]["key"]
            for entry in one["env"]
            if "valueFrom" in entry and "secretKeyRef" in entry["valueFrom"]
        }
        assert [found[name] for name in variables] == ["api-key", "next"]


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize("origins", ["https://a.example", ["https://a.example", "https://b.example"]])
def test_an_option_of_several_values_takes_them(origins, helm):
    """As in the router's configuration file."""
    keyed = {"apiKeys": {"secretName": "k"}, "settings": {"allowed_origins": origins}}
    args = container(templates(router(Chart().objects({"router": keyed}, helm=helm)))[0])["args"]
    values = [origins] if isinstance(origins, str) else origins
    start = args.index("--allowed-origins") + 1

    assert args[start : start + len(values)] == values

"""KV of answers goes back to prefill engines: one value switches on all that it takes (docs/kv-back.md)."""

import itertools
import json

import pytest

from support.helm_chart import Chart, default
from support.helm_checks import complaints
from support.helm_objects import (
    COMPONENT,
    WORKLOADS,
    container,
    engine_pods,
    env,
    flag,
    kind,
    one,
    pool,
    router,
    templates,
)

pytestmark = pytest.mark.processes


ON = {"returnKv": {"enabled": True}}
OFF = {"returnKv": {"enabled": False}}
ROLES = ("prefill", "decode")
LOCKED = {"networkPolicy": {"egress": {"enabled": True, "engineTo": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}}}


def transfer(template):
    return json.loads(flag(container(template)["args"], "--kv-transfer-config"))


def engines_of(objects, policy):
    """Return the roles of a policy's peers that are engines of the release."""
    rules = policy["spec"]["ingress"] + policy["spec"].get("egress", [])
    return [
        {peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in peers}
        for rule in rules
        if "ports" not in rule and (peers := rule.get("from") or rule.get("to")) and "podSelector" in peers[0]
    ]


@pytest.mark.parametrize("both", [False, True])
def test_engines_serve_both_roles_only_when_asked(both):
    """Those that do can turn, and hand over streams that move; KV of answers does not go back."""
    values = OFF | {"connector": {"kvBoth": both}}
    found = {role: transfer(template) for role, template in engine_pods(Chart().objects(values))}

    own = {"prefill": "kv_producer", "decode": "kv_consumer"}
    assert {role: config["kv_role"] for role, config in found.items()} == (
        dict.fromkeys(own, "kv_both") if both else own
    )
    assert not any("return_kv" in config["kv_connector_extra_config"] for config in found.values())


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_one_value_has_kv_go_back(mode):
    """Both roles lend and take, a read that fails costs no request, and routers know where conversations are."""
    objects = Chart().objects(ON | {"connector": {"mode": mode}})
    flags = dict(itertools.pairwise(container(templates(router(objects))[0])["args"]))

    assert complaints(objects) == []
    assert (flags["--return-kv"], flags["--prefill-policy"], flags["--decode-policy"]) == ("true", "prefix", "prefix")
    for _, template in engine_pods(objects):
        config = transfer(template)
        assert (config["kv_role"], config["kv_load_failure_policy"]) == ("kv_both", "recompute")
        assert config["kv_connector_extra_config"]["return_kv"] is True
        assert config["kv_connector_extra_config"].get("mode", "pull") == mode
        assert container(template)["args"].count("--enable-prefix-caching") == 1


def test_each_engine_finds_out_whether_its_kv_goes_back():
    """By default: the connector knows the shapes in which it was not tried, and vLLM whether prefixes are cached."""
    for _, template in engine_pods(default()):
        config = transfer(template)
        assert (config["kv_role"], config["kv_connector_extra_config"]["return_kv"]) == ("kv_both", "auto")
        assert "--enable-prefix-caching" not in container(template)["args"]
    assert flag(container(templates(router(default()))[0])["args"], "--reuse-kv") == "true"  # return_kv is part of it


IMPOSSIBLE = {
    "it is switched off": OFF,
    "a lost read fails": {"connector": {"loadFailurePolicy": "fail"}},
    "push through host memory": {"connector": {"mode": "push", "bufferDevice": "cpu"}},
    "no prefix cache": {"prefill": {"extraArgs": ["--no-enable-prefix-caching"]}},
    "a policy that forgets": {"router": {"settings": {"decode_policy": "power_of_two"}}},
    "no return_kv in routers": {"router": {"settings": {"return_kv": False}}},
    "no reuse_kv in routers": {"router": {"settings": {"reuse_kv": False}}},
    "no prefill pool": {"prefill": {"enabled": False}},
    "no decode pool": {"decode": {"enabled": False}},
    "ranks of decode": {"decode": {"dataParallel": 2}},
}


@pytest.mark.parametrize("values", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_where_it_cannot_be_engines_have_one_role_each(values):
    """Without a word, for nobody asked for it; `true` is refused there, if it is a contradiction."""
    found = [o for o in kind(Chart().objects(values), *WORKLOADS) if o["metadata"]["labels"][COMPONENT] in ROLES]

    assert found
    for pool_ in found:
        (template,) = templates(pool_)
        own = {"prefill": "kv_producer", "decode": "kv_consumer"}[pool_["metadata"]["labels"][COMPONENT]]
        assert transfer(template)["kv_role"] == own
        assert "return_kv" not in transfer(template)["kv_connector_extra_config"]
        assert "--enable-prefix-caching" not in container(template)["args"]


def test_what_the_connector_was_told_stays():
    for _, template in engine_pods(Chart().objects({"connector": {"extraConfig": {"return_kv": False}}})):
        assert transfer(template)["kv_role"] != "kv_both"
        assert transfer(template)["kv_connector_extra_config"]["return_kv"] is False


def test_the_side_channels_of_both_roles_can_be_reached_by_the_other():
    """P asks D where D listens: at its pod's address, which the policies open to the engines of the release alone."""
    objects = Chart().objects(ON | LOCKED)

    for role in ROLES:
        policy = one(objects, "NetworkPolicy", f"r-pdrelay-{role}")
        assert engines_of(objects, policy) == [set(ROLES), set(ROLES)]  # in and out
        told = env(templates(pool(objects, role))[0])["VLLM_NIXL_SIDE_CHANNEL_HOST"]
        assert told["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}


def test_with_kv_events_both_are_on():
    keyed = {"apiKey": {"secretName": "engines"}}
    objects = Chart().objects(ON | {"kvEvents": {"enabled": True}, "prefill": keyed, "decode": keyed})
    flags = dict(itertools.pairwise(container(templates(router(objects))[0])["args"]))

    assert complaints(objects) == []
    assert (flags["--return-kv"], flags["--kv-events"]) == ("true", "auto")
    assert all(
        container(template)["args"].count("--enable-prefix-caching") == 1 for _, template in engine_pods(objects)
    )


def test_settings_of_the_router_go_before_its_own():
    """expected_ttft remembers conversations, too."""
    objects = Chart().objects(ON | {"router": {"settings": {"decode_policy": "expected_ttft"}}})
    args = container(templates(router(objects))[0])["args"]

    assert [flag(args, f"--{role}-policy") for role in ROLES] == ["expected_ttft", "expected_ttft"]

"""Several routers share the load of engines: they find each other, prove who they are, and choose by it."""

import pytest

from support.helm_chart import DRAWN, Chart, Refused, default
from support.helm_objects import COMPONENT, container, env, flag, kind, one, router, templates

pytestmark = pytest.mark.processes


SEVERAL = [{}, {"replicas": 1, "autoscaling": {"type": "hpa", "max": 5}}]
NONE = [{"replicas": 1}, {"peers": {"enabled": False}}]


def arguments(objects):
    return container(templates(router(objects))[0])["args"]


@pytest.mark.parametrize("values", SEVERAL, ids=["two", "autoscaled"])
def test_several_routers_share_their_load(values):
    """A name leads to all of them, ready or not; the port is open to each other alone."""
    objects = Chart().objects({"router": values})
    args = arguments(objects)
    pod = container(templates(router(objects))[0])
    service = one(objects, "Service", "r-pdrelay-router-peers")
    policy = one(objects, "NetworkPolicy", "r-pdrelay-router")

    assert [flag(args, name) for name in ("--peers", "--peer-port")] == ["r-pdrelay-router-peers.ns.svc:8001", "8001"]
    assert [flag(args, f"--{leg}-policy") for leg in ("prefill", "decode")] == ["prefix"] * 2
    assert {"name": "peers", "containerPort": 8001, "protocol": "UDP"} in pod["ports"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"]
    assert service["spec"]["selector"] == policy["spec"]["podSelector"]["matchLabels"]
    (rule,) = [rule for rule in policy["spec"]["ingress"] if {"port": "peers", "protocol": "UDP"} in rule["ports"]]
    assert rule["from"] == [{"podSelector": policy["spec"]["podSelector"]}]


def test_their_secret_is_made_and_may_be_ones_own():
    """As that of the engines."""
    mine = Chart().objects({"router": {"peers": {"secret": {"name": "mine", "key": "k"}}}})
    made = one(default(), "Secret", "r-pdrelay-router-peers")
    name = "PDRELAY_PEER_SECRET"

    assert made["data"] == {"secret": DRAWN}
    wanted = {"secretKeyRef": {"name": "r-pdrelay-router-peers", "key": "secret"}}
    assert env(templates(router(default()))[0])[name]["valueFrom"] == wanted
    assert env(templates(router(mine))[0])[name]["valueFrom"] == {"secretKeyRef": {"name": "mine", "key": "k"}}
    assert [o for o in kind(mine, "Secret") if o["metadata"]["labels"][COMPONENT] == "router-peers"] == []
    with pytest.raises(Refused, match=r"router\.peers\.secret\.name"):
        Chart().text({"router": {"peers": {"secret": {"create": False}}}})


@pytest.mark.parametrize("values", NONE, ids=["one", "switched off"])
def test_a_router_that_has_no_peers_has_nothing_of_it(values):
    """Neither a port nor a policy that would be of no use."""
    plain = {"settings": {"reuse_kv": False}}
    objects = Chart().objects({"router": values | plain | ({} if "peers" in values else {"peers": {"port": 9}})})
    args = arguments(objects)

    assert not {"--peers", "--prefill-policy"} & set(args)
    assert [o["metadata"]["name"] for o in objects if "peers" in o["metadata"]["name"]] == []
    assert "PDRELAY_PEER_SECRET" not in env(templates(router(objects))[0])


def test_policies_of_ones_own_stay():
    """Those of router.settings; beside them those of reuse_kv, and without it those that routers with peers want."""
    mine = {"prefill_policy": "round_robin"}
    args = arguments(Chart().objects({"router": {"settings": mine}}))
    plain = arguments(Chart().objects({"router": {"settings": mine | {"reuse_kv": False}}}))

    assert [flag(args, f"--{leg}-policy") for leg in ("prefill", "decode")] == ["round_robin", "prefix"]
    assert [flag(plain, f"--{leg}-policy") for leg in ("prefill", "decode")] == ["round_robin", "least_loaded"]


def test_routers_use_the_kv_that_engines_have():
    """Unless it is switched off; they ask only engines for events that publish some."""
    args = arguments(default())
    plain = arguments(Chart().objects({"router": {"settings": {"reuse_kv": False}}}))

    assert [flag(args, name) for name in ("--reuse-kv", "--kv-events")] == ["true", "off"]
    assert flag(plain, "--reuse-kv") == "false"
    assert "--kv-events" not in plain


def test_egress_leads_to_the_other_routers():
    """A closed egress would keep them apart without a word."""
    objects = Chart().objects(
        {"networkPolicy": {"egress": {"enabled": True, "engineTo": [{"ipBlock": {"cidr": "9.9.9.9/32"}}]}}}
    )
    policy = one(objects, "NetworkPolicy", "r-pdrelay-router")
    (rule,) = [rule for rule in policy["spec"]["egress"] if {"port": 8001, "protocol": "UDP"} in rule.get("ports", ())]

    assert rule["to"] == [{"podSelector": policy["spec"]["podSelector"]}]

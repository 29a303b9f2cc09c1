"""Wide EP: an engine whose data-parallel ranks are spread over the pods of a group, with a KV address each."""

import json

import msgspec
import pytest

from pdrelay_proxy.core.discovery.pods import Pod, engine_of
from support.helm_chart import HELMS, Chart, default
from support.helm_objects import PROBES, WORKER_INDEX, container, env, flag, matches, one, pods, pool, templates

pytestmark = pytest.mark.processes


WIDE = {"kind": "LeaderWorkerSet", "nodes": 2, "dataParallel": 4, "expertParallel": True}
ROLES = ("prefill", "decode")
READY = {"podIP": "10.0.0.7", "phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}


def group(role, values=None):
    """Return the leader's and the workers' templates of a pool of groups, of the example or of these values."""
    objects = default("wide-ep") if values is None else Chart().objects({role: {**WIDE, **values}})
    return templates(pool(objects, role))


def ports(template):
    return {port["name"]: port["containerPort"] for port in container(template).get("ports", ())}


def test_pods_of_a_group_are_started_as_one_engine():
    """Their arguments differ only in where the leader binds, how workers find it, and who serves the API."""
    leader, worker = (container(template)["args"] for template in group("decode"))

    for args in (leader, worker):
        assert [flag(args, f"--data-parallel-{name}") for name in ("size", "size-local", "rpc-port")] == [
            "32", "8", "29650",
        ]  # fmt: skip
        assert [flag(args, f"--{name}") for name in ("nnodes", "node-rank", "master-addr", "master-port")] == [
            "4", "$(LWS_WORKER_INDEX)", "$(LWS_LEADER_ADDRESS)", "29601",
        ]  # fmt: skip
        assert "--enable-expert-parallel" in args
    assert flag(leader, "--data-parallel-address") == "$(POD_IP)"  # a name may not lead anywhere yet
    assert flag(worker, "--data-parallel-address") == "$(LWS_LEADER_ADDRESS)"
    own = {"$(POD_IP)", "--api-server-count", "8"}, {"$(LWS_LEADER_ADDRESS)", "--headless", "8"}
    assert [set(leader) - set(worker) - own[0], set(worker) - set(leader) - own[1]] == [set(), set()]
    assert [flag(args, "--api-server-count") for args in (leader, worker)] == ["8", None]
    assert ["--headless" in args for args in (leader, worker)] == [False, True]


def test_experts_are_spread_only_where_a_value_says_so():
    """A dense model has none."""
    for template in group("decode", {"expertParallel": False}):
        assert "--enable-expert-parallel" not in container(template)["args"]
        assert "--api-server-count" not in container(template)["args"]


@pytest.mark.parametrize("role", ROLES)
def test_each_rank_has_a_kv_address_in_its_own_pod(role):
    """The host is the pod's, and the port the rank's: the first ranks are the leader's, the others the workers'."""
    base = {"prefill": 5600, "decode": 5700}[role]
    leader, worker = group(role, {"kvEvents": {"enabled": True, "port": 6000}})

    for template in (leader, worker):
        assert env(template)["VLLM_NIXL_SIDE_CHANNEL_HOST"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
        assert env(template)["VLLM_NIXL_SIDE_CHANNEL_PORT"]["value"] == str(base)
    found = ports(leader)
    assert {name: found.pop(name) for name in ("side-0", "side-1", "kv-events-0", "kv-events-1")} == {
        "side-0": base, "side-1": base + 1, "kv-events-0": 6000, "kv-events-1": 6001,
    }  # fmt: skip
    assert list(found) == ["http", "group", "rpc"]
    assert ports(worker) == {
        "side-2": base + 2, "side-3": base + 3, "kv-events-2": 6002, "kv-events-3": 6003,
    }  # fmt: skip


def test_only_the_leader_is_probed_and_both_drain():
    """A worker's hook asks the leader, whose metrics are those of all ranks."""
    leader, worker = map(container, group("prefill"))
    hooks = [c["lifecycle"]["preStop"]["exec"]["command"] for c in (leader, worker)]

    assert [[probe for probe in PROBES if probe in c] for c in (leader, worker)] == [list(PROBES), []]
    assert hooks[1] == [*hooks[0], "--of-leader"]
    for c in (leader, worker):
        assert c["resources"]["limits"] == {"memory": "512Gi", "nvidia.com/gpu": "8", "rdma/hca": "8"}


@pytest.mark.parametrize("nodes", [1, 2])
def test_api_servers_wait_for_the_ranks_as_long_as_the_probe(nodes):
    """vLLM's own 600 s are shorter than a first download; a value of `extraEnv` goes first."""
    name = "VLLM_ENGINE_READY_TIMEOUT_S"
    (leader, *_), (named, *_), (alone, *_) = (
        group("decode", {"nodes": nodes, "probes": {"startupSeconds": 2400}, **more})
        for more in ({}, {"extraEnv": [{"name": name, "value": "7"}]}, {"dataParallel": 1, "tensorParallel": 4})
    )

    assert env(leader)[name]["value"] == "2400"
    assert [entry["value"] for entry in container(named)["env"] if entry["name"] == name] == ["7"]
    assert name not in env(alone)


def test_one_pod_that_ends_ends_its_group():
    """Its ranks are the leader's engine, which cannot go on without them; a rollout has one group more."""
    for role, nodes in (("prefill", 2), ("decode", 4)):
        spec = pool(default("wide-ep"), role)["spec"]
        assert spec["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
        assert (spec["leaderWorkerTemplate"]["size"], spec["startupPolicy"]) == (nodes, "LeaderCreated")
        assert spec["rolloutStrategy"]["rollingUpdateConfiguration"] == {"maxUnavailable": 0, "maxSurge": 1}


def test_the_router_sees_the_leader_with_all_ranks():
    """`#dp=D` of one address: the pods of workers are no engines."""
    seen = {}
    for _, meta, spec in pods(default("wide-ep")):
        for index in ("0", "1") if "pdrelay/role" in meta["labels"] else ():
            body = {"metadata": {**meta, "name": "x", "uid": "u"}, "spec": spec, "status": READY}
            body["metadata"]["labels"] = {**meta["labels"], WORKER_INDEX: index}
            is_worker = "--headless" in spec["containers"][0]["args"]
            if is_worker is (index == "1"):
                seen[meta["labels"]["pdrelay/role"], index] = engine_of(msgspec.json.decode(json.dumps(body), type=Pod))

    assert seen["prefill", "1"] is seen["decode", "1"] is None
    assert [seen[role, "0"].target.ranks for role in ROLES] == [tuple(range(16)), tuple(range(32))]
    assert seen["decode", "0"].target.address.port == 8200


@pytest.mark.parametrize("helm", HELMS)
def test_engines_reach_every_pod_of_a_group_and_nobody_else_does(helm):
    """Side channel, UCX and what the ranks of an engine say to each other: over any port, between engines alone."""
    events = {"kvEvents": {"enabled": True, "from": [{"podSelector": {"matchLabels": {"app": "indexer"}}}]}}
    open_to = {"egress": {"enabled": True, "engineTo": [{"ipBlock": {"cidr": "10.9.0.0/24"}}]}}
    values = {"prefill": {**WIDE, **events}, "decode": WIDE, "networkPolicy": open_to}
    objects = Chart().objects(values, helm=helm)
    every = [template["metadata"]["labels"] for role in ROLES for template in templates(pool(objects, role))]

    assert len(every) == 4
    for role in ROLES:
        spec = one(objects, "NetworkPolicy", f"r-pdrelay-{role}")["spec"]
        assert all(matches(spec["podSelector"], t["metadata"]["labels"]) for t in templates(pool(objects, role)))
        everywhere = [rule["from"] for rule in spec["ingress"] if "ports" not in rule]
        (out,) = [rule["to"] for rule in spec["egress"] if "ports" not in rule and "podSelector" in rule["to"][0]]
        for peers in (*everywhere, out):
            assert all(any(matches(peer["podSelector"], labels) for peer in peers) for labels in every)
            assert {frozenset(peer) for peer in peers} == {frozenset({"podSelector"})}
        assert len(everywhere) == 1
    rules = one(objects, "NetworkPolicy", "r-pdrelay-prefill")["spec"]["ingress"]
    assert {"ports": [{"port": f"kv-events-{rank}"} for rank in range(4)], **_from("indexer")} in rules


def _from(app):
    return {"from": [{"podSelector": {"matchLabels": {"app": app}}}]}


def test_a_group_of_tensor_parallel_pods_stays_one_rank():
    """Its workers have no ranks, no ports and no address of their own."""
    leader, worker = group("decode", {"dataParallel": 1, "tensorParallel": 8})

    assert ports(leader) == {"http": 8200, "group": 29601, "side-0": 5700}
    assert ports(worker) == {}
    assert not any("data-parallel" in arg for template in (leader, worker) for arg in container(template)["args"])
    assert env(worker)["VLLM_NIXL_SIDE_CHANNEL_HOST"]["value"] == "$(LWS_LEADER_ADDRESS)"

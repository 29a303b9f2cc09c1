"""What engines are started with, by the chart and in the documents, read by vLLM's own parser. It takes 20 s to import,
so all share one process."""

import json
import re
import subprocess
import sys

import pytest

from support.documents import PAGES, blocks
from support.helm_chart import CASES, Chart, default
from support.helm_objects import WORKLOADS, container, env, flag, kind, pool, templates

pytestmark = pytest.mark.processes


READING = """
import json, sys
from pathlib import Path
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = make_arg_parser(FlexibleArgumentParser())
read = []
for args in json.load(sys.stdin):
    try:
        parsed = parser.parse_args(args)
        engine = AsyncEngineArgs.from_cli_args(parsed)
        transfer = engine.kv_transfer_config or KVTransferConfig()
        read.append({
            "model": parsed.model_tag, "served": parsed.served_model_name, "port": parsed.port, "host": parsed.host,
            "tp": engine.tensor_parallel_size, "dp": engine.data_parallel_size, "pp": engine.pipeline_parallel_size,
            "nodes": engine.nnodes, "rank": engine.node_rank, "leader": engine.master_addr, "headless": parsed.headless,
            "role": transfer.kv_role, "module": transfer.kv_connector_module_path,
            "extra": transfer.kv_connector_extra_config, "buffer": transfer.kv_buffer_device,
            "length": engine.max_model_len, "shutdown": engine.shutdown_timeout,
            "events": engine.kv_events_config.endpoint if engine.kv_events_config else None,
            "experts": engine.enable_expert_parallel,
        })
    except SystemExit as exc:
        read.append({"refused": str(exc)})
print("\\n" + json.dumps(read))
"""


def seen_by(number):
    """Return what the kubelet puts in the arguments of a group's pod: the leader is 0, the template of workers 1."""
    return {"$(LWS_LEADER_ADDRESS)": "leader.ns", "$(LWS_WORKER_INDEX)": str(number), "$(POD_IP)": f"10.0.0.{number}"}


def started():
    """Return all pods of engines of all cases: (what, its container), each with what the kubelet puts in."""
    for case in CASES:
        for o in kind(default(case), *WORKLOADS):
            for number, template in enumerate(templates(o)):
                if "pdrelay/role" in template["metadata"]["labels"]:
                    yield f"{case}-{template['metadata']['labels']['pdrelay/role']}-{number}", container(template)


def documented():
    """Return the arguments of each `vllm serve` of the pages, as a shell gives them. It finds nothing else to run."""
    shell = 'command_not_found_handle() { :; }; vllm() { printf "%s\\0" "$@"; printf "\\1"; }; PATH=/nowhere MODEL=M\n'
    for block in [block for page in PAGES for block in blocks(page.read_text()) if re.search(r"\bvllm serve ", block)]:
        done = subprocess.run(["/bin/bash", "-c", shell + block], capture_output=True, text=True, check=True)
        found = [call.split("\0")[:-1] for call in done.stdout.split("\1")[:-1]]
        yield from (words[1:] for words in found if words[0] == "serve")


def read(argvs):
    argv = [sys.executable, "-W", "ignore", "-c", READING]
    done = subprocess.run(argv, input=json.dumps(argvs), capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow  # the import of vLLM
@pytest.mark.timeout(420)
def test_vllm_reads_the_arguments_of_every_pod_as_they_are_meant():
    """And refuses a flag that it does not know, or everything above would be nothing."""
    pods = dict(started())
    argvs = [[seen_by(name[-1]).get(arg, arg) for arg in c["args"][1:]] for name, c in pods.items()]

    shown = [*documented()]

    *found, wrong = read([*shown, *argvs, [*argvs[0], "--no-such-flag"]])

    assert wrong == {"refused": "2"}
    assert len(shown) > 3
    assert [words for words, one in zip(shown, found, strict=False) if "refused" in one] == []
    found = found[len(shown) :]
    for (name, c), one in zip(pods.items(), found, strict=True):
        assert "refused" not in one, f"{name}: vLLM refuses {c['args']}"
        assert c["args"][0] == "serve"
        role = name.split("-")[-2]
        own = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}[role]
        assert one["role"] == ("kv_both" if "return_kv" in one["extra"] else own)
        assert (one["module"], one["pp"], one["host"]) == ("pdrelay_connector", 1, "0.0.0.0")
        assert one["headless"] == ("http" not in {port["name"] for port in c.get("ports", ())})
        assert one["shutdown"] == 10
    two = found[list(pods).index("2p4d-decode-0")]
    assert (two["served"], two["tp"], two["dp"]) == (["qwen"], 2, 2)
    assert found[list(pods).index("2p4d-prefill-0")]["events"] == "tcp://*:5557"
    private = found[list(pods).index("hostnetwork-rdma-decode-0")]
    assert private["events"] == "ipc:///run/pdrelay/kv-events/inproc.ipc"
    worker = found[list(pods).index("tp8-multinode-decode-1")]
    assert (worker["tp"], worker["nodes"], worker["rank"], worker["leader"]) == (8, 2, 1, "leader.ns")
    assert worker["extra"] == {"kv_lease_duration": 30, "mode": "push", "return_kv": "auto"}
    assert found[list(pods).index("cpu-demo-prefill-0")]["buffer"] == "cpu"


def test_workers_of_an_engine_ask_its_leader():
    """In push the workers of a prefill engine connect to its scheduler, which is on the leader."""
    pods = dict(started())
    leader, worker = pods["tp8-multinode-prefill-0"], pods["tp8-multinode-prefill-1"]

    assert [worker["args"].count(f) for f in ("--headless", "--nnodes", "--node-rank")] == [1, 1, 1]
    assert "--headless" not in leader["args"]
    assert "readinessProbe" not in worker
    for o in kind(default("tp8-multinode"), "LeaderWorkerSet"):
        first, second = templates(o)
        assert env(first)["VLLM_NIXL_SIDE_CHANNEL_HOST"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
        assert env(second)["VLLM_NIXL_SIDE_CHANNEL_HOST"]["value"] == "$(LWS_LEADER_ADDRESS)"
        assert o["spec"]["leaderWorkerTemplate"]["size"] == 2


def test_a_group_of_tensor_parallel_pods_is_one_rank():
    """Its workers have no ranks, no ports, no API and no address of their own."""
    values = {"kind": "LeaderWorkerSet", "nodes": 2, "tensorParallel": 8, "apiServers": 4}
    leader, worker = templates(pool(Chart().objects({"decode": values}), "decode"))

    assert ports(leader) == {"http": 8200, "group": 29601, "side-0": 5700}
    assert ports(worker) == {}
    assert [flag(container(one)["args"], "--api-server-count") for one in (leader, worker)] == ["4", None]
    assert not any("data-parallel" in arg for template in (leader, worker) for arg in container(template)["args"])


def ports(template):
    return {port["name"]: port["containerPort"] for port in container(template).get("ports", ())}


def test_one_pod_that_ends_ends_its_group():
    """Its engine cannot go on without it; a rollout has one group more."""
    for role in ("prefill", "decode"):
        spec = pool(default("tp8-multinode"), role)["spec"]
        assert spec["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
        assert (spec["leaderWorkerTemplate"]["size"], spec["startupPolicy"]) == (2, "LeaderCreated")
        assert spec["rolloutStrategy"]["rollingUpdateConfiguration"] == {"maxUnavailable": 0, "maxSurge": 1}


def test_api_servers_wait_for_the_ranks_as_long_as_the_probe():
    """vLLM's own 600 s are shorter than a first download; a value of `extraEnv` goes first."""
    name = "VLLM_ENGINE_READY_TIMEOUT_S"
    several, named, alone = (
        templates(pool(Chart().objects({"decode": {"probes": {"startupSeconds": 2400}, **more}}), "decode"))[0]
        for more in (
            {"dataParallel": 4},
            {"dataParallel": 4, "extraEnv": [{"name": name, "value": "7"}]},
            {"tensorParallel": 4},
        )
    )

    assert env(several)[name]["value"] == "2400"
    assert [entry["value"] for entry in container(named)["env"] if entry["name"] == name] == ["7"]
    assert name not in env(alone)


def test_accelerators_are_counted_from_the_parallelism():
    """Of each pod: ranks and layers' shares, divided over the nodes."""
    limits = {name: c["resources"]["limits"] for name, c in started()}

    assert limits["None-prefill-0"] == {"nvidia.com/gpu": "1"}
    assert limits["2p4d-decode-0"] == {"nvidia.com/gpu": "4"}
    assert limits["tp8-multinode-prefill-1"] == {"nvidia.com/gpu": "4", "rdma/hca": "4"}
    assert limits["cpu-demo-decode-0"] == {}
    assert limits["hostnetwork-rdma-prefill-0"]["hugepages-2Mi"] == "2Gi"
    objects = Chart().objects({"prefill": {"accelerator": {"count": 3}}})
    assert "'nvidia.com/gpu': '3'" in str(objects)

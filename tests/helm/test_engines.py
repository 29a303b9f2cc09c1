"""What engines are started with, read by vLLM's own parser. It takes 20 s to import, so all pods share one process."""

import json
import subprocess
import sys

import pytest

from support.helm_chart import CASES, Chart, default
from support.helm_objects import WORKLOADS, container, env, kind, templates

READING = """
import json, sys
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
        transfer = engine.kv_transfer_config
        read.append({
            "model": parsed.model_tag, "served": parsed.served_model_name, "port": parsed.port, "host": parsed.host,
            "tp": engine.tensor_parallel_size, "dp": engine.data_parallel_size, "pp": engine.pipeline_parallel_size,
            "nodes": engine.nnodes, "rank": engine.node_rank, "leader": engine.master_addr, "headless": parsed.headless,
            "role": transfer.kv_role, "module": transfer.kv_connector_module_path,
            "extra": transfer.kv_connector_extra_config, "buffer": transfer.kv_buffer_device,
            "length": engine.max_model_len, "shutdown": engine.shutdown_timeout,
            "events": engine.kv_events_config.endpoint if engine.kv_events_config else None,
        })
    except SystemExit as exc:
        read.append({"refused": str(exc)})
print("\\n" + json.dumps(read))
"""
SEEN_BY_PODS = {"$(LWS_LEADER_ADDRESS)": "leader.ns", "$(LWS_WORKER_INDEX)": "1"}


def started():
    """Return all pods of engines of all cases: (what, its container), each with what the kubelet puts in."""
    for case in CASES:
        for o in kind(default(case), *WORKLOADS):
            for number, template in enumerate(templates(o)):
                if "xpyd.io/role" in template["metadata"]["labels"]:
                    yield f"{case}-{template['metadata']['labels']['xpyd.io/role']}-{number}", container(template)


def read(argvs):
    argv = [sys.executable, "-W", "ignore", "-c", READING]
    done = subprocess.run(argv, input=json.dumps(argvs), capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow  # the import of vLLM
@pytest.mark.timeout(180)
def test_vllm_reads_the_arguments_of_every_pod_as_they_are_meant():
    """And refuses a flag that it does not know, or everything above would be nothing."""
    pods = dict(started())
    argvs = [[SEEN_BY_PODS.get(arg, arg) for arg in c["args"][1:]] for c in pods.values()]

    *found, wrong = read([*argvs, [*argvs[0], "--no-such-flag"]])

    assert wrong == {"refused": "2"}
    for (name, c), one in zip(pods.items(), found, strict=True):
        assert "refused" not in one, f"{name}: vLLM refuses {c['args']}"
        assert c["args"][0] == "serve"
        role = "prefill" if "prefill" in name else "decode"
        assert one["role"] == {"prefill": "kv_producer", "decode": "kv_consumer"}[role]
        assert (one["module"], one["pp"], one["host"]) == ("xpyd_connector", 1, "0.0.0.0")
        assert one["headless"] == ("http" not in {port["name"] for port in c.get("ports", ())})
        assert one["shutdown"] == 10
    two = found[list(pods).index("2p4d-decode-0")]
    assert (two["served"], two["tp"], two["dp"]) == (["qwen"], 2, 2)
    assert found[list(pods).index("2p4d-prefill-0")]["events"] == "tcp://*:5557"
    private = found[list(pods).index("hostnetwork-rdma-decode-0")]
    assert private["events"] == "ipc:///run/xpyd/kv-events/inproc.ipc"
    worker = found[list(pods).index("tp8-multinode-decode-1")]
    assert (worker["tp"], worker["nodes"], worker["rank"], worker["leader"]) == (8, 2, 1, "leader.ns")
    assert worker["extra"] == {"kv_lease_duration": 30, "mode": "push"}
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

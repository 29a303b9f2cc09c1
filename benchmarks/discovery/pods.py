"""Pods as an API server sends them: with status and managed fields, which are most of their
bytes.
"""

import json

import msgspec

ARGUMENTS = """
serve Qwen/Qwen3-8B --served-model-name qwen3-8b --host 0.0.0.0 --port 8100 --tensor-parallel-size 1
--dtype auto --enable-prompt-tokens-details --shutdown-timeout 10 --kv-transfer-config
"""


def pod(number, *, role="prefill", revision="3f1c9a0b77de", phase="ready", version=1):
    """Describe a pod of the chart. ``phase``: created, placed, started, ready, leaving."""
    name = f"pdrelay-{role}-7d9c6b5f4-{number:05d}"
    labels = {
        "app.kubernetes.io/component": role,
        "app.kubernetes.io/instance": "pdrelay",
        "app.kubernetes.io/name": "pdrelay",
        "pod-template-hash": "7d9c6b5f4",
        "pdrelay/release": "pdrelay",
        "pdrelay/revision": revision,
        "pdrelay/role": role,
    }
    meta = {
        "name": name,
        "generateName": name.rpartition("-")[0] + "-",
        "namespace": "llm",
        "uid": f"0f2b6a4e-5b1d-4c58-9d0e-{number:012d}",
        "resourceVersion": str(version),
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "labels": labels,
        "annotations": {"pdrelay/port": "8100"},
        "ownerReferences": [
            {
                "apiVersion": "apps/v1",
                "kind": "ReplicaSet",
                "name": f"pdrelay-{role}-7d9c6b5f4",
                "uid": "5c1f1d52-8f0e-4f0b-93c5-1b7c8a4e9d11",
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
        **({"deletionTimestamp": "2026-01-01T01:00:00Z"} if phase == "leaving" else {}),
    }
    spec = _spec(role)
    status = _status(number, phase)
    managers = [
        ("kube-controller-manager", {"metadata": {"labels": labels}, "spec": spec}),
        ("kubelet", {"status": status}),
    ]
    meta["managedFields"] = [
        {
            "manager": manager,
            "operation": "Update",
            "apiVersion": "v1",
            "time": "2026-01-01T00:00:00Z",
            "fieldsType": "FieldsV1",
            "fieldsV1": _fields(owned),
        }
        for manager, owned in managers
    ]
    return {"kind": "Pod", "apiVersion": "v1", "metadata": meta, "spec": spec, "status": status}


LIFE = ("created", "placed", "started", "ready")  # the events of a pod that comes


def line(kind, body):
    """One event of a watch."""
    return json.dumps({"type": kind, "object": body}, separators=(",", ":")).encode()


def role_of(number):
    return "prefill" if number % 2 == 0 else "decode"


def pages_of(pods, size=200):
    """Return the answers to a LIST."""
    raw = [msgspec.Raw(json.dumps(one, separators=(",", ":")).encode()) for one in pods]
    cut = [raw[start : start + size] for start in range(0, len(raw), size)]
    return [
        msgspec.json.encode(
            {
                "metadata": {
                    "resourceVersion": "1",
                    "continue": str(number + 1) if number + 1 < len(cut) else "",
                },
                "items": items,
            }
        )
        for number, items in enumerate(cut)
    ]


def _spec(role):
    probe = {
        "httpGet": {"path": "/health", "port": "http", "scheme": "HTTP"},
        "periodSeconds": 10,
        "timeoutSeconds": 5,
        "successThreshold": 1,
        "failureThreshold": 12,
    }
    transfer = {
        "kv_connector": "PDRelayConnector",
        "kv_connector_module_path": "pdrelay_connector",
        "kv_role": "kv_producer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_lease_duration": 30},
    }
    from_pod = {"valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}}}
    engine = {
        "name": "engine",
        "image": "registry.example.com/pdrelay/engine:0.1.0",
        "command": ["vllm"],
        "args": [*ARGUMENTS.split(), json.dumps(transfer)],
        "env": [
            {"name": "POD_IP", **from_pod},
            {"name": "VLLM_HOST_IP", "value": "$(POD_IP)"},
            {"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", **from_pod},
            {"name": "VLLM_NIXL_SIDE_CHANNEL_PORT", "value": "5600"},
            *(
                {"name": name, "value": "/cache"}
                for name in ("XDG_CACHE_HOME", "VLLM_CACHE_ROOT", "HF_HOME")
            ),
        ],
        "ports": [
            {"name": name, "containerPort": port, "protocol": "TCP"}
            for name, port in (("http", 8100), ("side-0", 5600))
        ],
        "startupProbe": probe,
        "readinessProbe": probe,
        "livenessProbe": probe,
        "lifecycle": {
            "preStop": {
                "exec": {
                    "command": ["python3", "/opt/pdrelay/drain.py", "--port=8100", f"--role={role}"]
                }
            }
        },
        "resources": {
            "requests": {"cpu": "4", "memory": "32Gi", "nvidia.com/gpu": "1"},
            "limits": {"nvidia.com/gpu": "1"},
        },
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": name, "mountPath": path}
            for name, path in (
                ("shm", "/dev/shm"),
                ("tmp", "/tmp"),
                ("scripts", "/opt/pdrelay"),
                ("cache", "/cache"),
            )
        ],
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "File",
        "imagePullPolicy": "IfNotPresent",
    }
    return {
        "containers": [engine],
        "volumes": [
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}},
            {"name": "tmp", "emptyDir": {}},
            {
                "name": "scripts",
                "configMap": {"name": f"pdrelay-{role}-scripts", "defaultMode": 420},
            },
            {"name": "cache", "emptyDir": {"sizeLimit": "100Gi"}},
        ],
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": 360,
        "dnsPolicy": "ClusterFirst",
        "serviceAccountName": "pdrelay-engine",
        "automountServiceAccountToken": False,
        "nodeName": "gpu-node-0001.example.internal",
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "schedulerName": "default-scheduler",
        "tolerations": [
            {
                "key": f"node.kubernetes.io/{key}",
                "operator": "Exists",
                "effect": "NoExecute",
                "tolerationSeconds": 300,
            }
            for key in ("not-ready", "unreachable")
        ],
        "priority": 0,
        "enableServiceLinks": False,
        "preemptionPolicy": "PreemptLowerPriority",
    }


def _status(number, phase):
    reached = LIFE.index("ready" if phase == "leaving" else phase)
    ready = reached == 3
    conditions = [
        "PodScheduled",
        "Initialized",
        "PodReadyToStartContainers",
        "ContainersReady",
        "Ready",
    ]
    found = {
        "phase": "Running" if reached >= 2 else "Pending",
        "conditions": [
            {
                "type": kind,
                "status": str(ready or kind == "PodScheduled"),
                "lastProbeTime": None,
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }
            for kind in conditions[: 1 if reached < 2 else 5]
        ],
        "qosClass": "Burstable",
    }
    if reached >= 2:
        address = f"10.{number // 65536 + 1}.{number // 256 % 256}.{number % 256}"
        found |= {
            "hostIP": "10.200.0.1",
            "hostIPs": [{"ip": "10.200.0.1"}],
            "podIP": address,
            "podIPs": [{"ip": address}],
            "startTime": "2026-01-01T00:00:00Z",
            "containerStatuses": [
                {
                    "name": "engine",
                    "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
                    "lastState": {},
                    "ready": ready,
                    "restartCount": 0,
                    "image": "registry.example.com/pdrelay/engine:0.1.0",
                    "imageID": f"registry.example.com/pdrelay/engine@sha256:{'0' * 64}",
                    "containerID": f"containerd://{'0' * 64}",
                    "started": ready,
                }
            ],
        }
    return found


def _fields(value):
    """Say who owns what as the API server does: a key for each field."""
    if isinstance(value, dict):
        return {f"f:{key}": _fields(inner) for key, inner in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        key = next((key for key in ("name", "type", "ip") if key in value[0]), None)
        return (
            {f'k:{{"{key}":"{one[key]}"}}': {".": {}, **_fields(one)} for one in value}
            if key
            else {}
        )
    return {}

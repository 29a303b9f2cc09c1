"""As much of a cluster as helm asks for before it renders: its version, what kinds it has, and its objects."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_KINDS = {
    "v1": {
        "Secret": "secrets",
        "ConfigMap": "configmaps",
        "Service": "services",
        "ServiceAccount": "serviceaccounts",
        "Namespace": "namespaces",
    },
    "apps/v1": {"Deployment": "deployments"},
    "autoscaling/v2": {"HorizontalPodAutoscaler": "horizontalpodautoscalers"},
    "keda.sh/v1alpha1": {"ScaledObject": "scaledobjects"},
    "disaggregatedset.x-k8s.io/v1": {
        "DisaggregatedSet": "disaggregatedsets",
        "DisaggregatedSetRoleScaler": "disaggregatedsetrolescalers",
    },
    "leaderworkerset.x-k8s.io/v1": {"LeaderWorkerSet": "leaderworkersets"},
    "monitoring.coreos.com/v1": {"PodMonitor": "podmonitors"},
    "policy/v1": {"PodDisruptionBudget": "poddisruptionbudgets"},
    "networking.k8s.io/v1": {"NetworkPolicy": "networkpolicies"},
    "rbac.authorization.k8s.io/v1": {"Role": "roles", "RoleBinding": "rolebindings"},
}
# What any namespace of a running cluster has, and any cluster.
ROOT_CA = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "kube-root-ca.crt", "namespace": "ns"}}
KUBE_SYSTEM = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "kube-system"}}


def _listed(version, kinds):
    verbs = ["get", "list"]
    found = [
        {"name": plural, "singularName": kind.lower(), "namespaced": kind != "Namespace", "kind": kind, "verbs": verbs}
        for kind, plural in kinds.items()
    ]
    return {"kind": "APIResourceList", "groupVersion": version, "resources": found}


def _group(version):
    one = {"groupVersion": version, "version": version.partition("/")[2]}
    return {"name": version.partition("/")[0], "versions": [one], "preferredVersion": one}


_PAGES = {
    "/version": {"major": "1", "minor": "33", "gitVersion": "v1.33.0"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(v) for v in _KINDS if "/" in v]},
}


def _path(o):
    version, meta = o["apiVersion"], o["metadata"]
    root = f"/{'apis' if '/' in version else 'api'}/{version}/namespaces"
    if o["kind"] == "Namespace":
        return f"{root}/{meta['name']}"
    return f"{root}/{meta['namespace']}/{_KINDS[version][o['kind']]}/{meta['name']}"


@contextmanager
def cluster(secrets, others=(), lacking=()) -> Iterator[str]:
    """Serve these secrets, by namespace and name, and other objects; yield the address. Some kinds may be lacking."""
    pages = _PAGES | {_path(o): o for o in others}
    for version, kinds in _KINDS.items():
        left = {kind: plural for kind, plural in kinds.items() if kind not in lacking}
        pages |= {f"/{'apis' if '/' in version else 'api'}/{version}": _listed(version, left)}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            path = self.path.partition("?")[0]
            _, _, rest = path.partition("/api/v1/namespaces/")
            namespace, _, name = rest.partition("/secrets/")
            found = pages.get(path)
            if (namespace, name) in secrets:
                found = {"apiVersion": "v1", "kind": "Secret", "type": "Opaque"} | secrets[namespace, name]
            missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
            body = json.dumps(found or missing).encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()

"""A real Kubernetes API, which the environment names; and what a cluster does to a release in it."""

import base64
import os
import re
import ssl
import tempfile
from pathlib import Path

import httpx
import yaml

from support.helm_chart import CHART, LEAST, least_values, run

KUBECONFIG = os.environ.get("PDRELAY_TEST_KUBECONFIG", "")
WHY_NOT = "PDRELAY_TEST_KUBECONFIG names no kubeconfig of a cluster in which tests may make namespaces"
STRICT = {"dryRun": "All", "fieldValidation": "Strict"}
AUTOSCALER = "kube-controller-manager"  # who writes for the HPA controller, and so for KEDA
BY_HAND = "kubectl"


class ApiServer:
    """Calls it as the user of the kubeconfig, who may do everything. Use it as a context manager."""

    def __init__(self, kubeconfig: str) -> None:
        self.kubeconfig = kubeconfig
        config = yaml.safe_load(Path(kubeconfig).read_text())
        context = _named(config["contexts"], config["current-context"])["context"]
        cluster = _named(config["clusters"], context["cluster"])["cluster"]
        user = _named(config["users"], context["user"])["user"]
        self.url = cluster["server"]
        self.authority = _content(cluster, "certificate-authority")
        token = user.get("token")
        self._client = httpx.Client(
            base_url=self.url,
            verify=_tls(self.authority, user),
            headers={"authorization": f"Bearer {token}"} if token else {},
            trust_env=False,
            timeout=30,
        )
        self._plurals: dict[tuple[str, str], str] = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._client.close()

    def call(self, method, path, body=None, *, query=None, token=None, kind="application/json"):
        """Return the answer, whatever its code; a token is that of another user."""
        headers = {"content-type": kind} | ({"authorization": f"Bearer {token}"} if token else {})
        return self._client.request(method, path, json=body, params=query, headers=headers)

    def made(self, method, path, body=None, **more):
        """Return the object that an allowed call gives."""
        answer = self.call(method, path, body, **more)
        assert answer.is_success, answer.text
        return answer.json()

    def has(self, version, kind):
        return self._plural(version, kind) is not None

    def path(self, version, kind, namespace, name=""):
        """Return where objects of this kind are."""
        return f"{_root(version)}/namespaces/{namespace}/{self._plural(version, kind)}{name and f'/{name}'}"

    def _plural(self, version, kind):
        if (version, kind) not in self._plurals:
            answer = self.call("GET", _root(version))
            rows = answer.json()["resources"] if answer.is_success else ()
            self._plurals |= {(version, row["kind"]): row["name"] for row in rows if "/" not in row["name"]}
        return self._plurals.get((version, kind))


def _root(version):
    return f"/{'apis' if '/' in version else 'api'}/{version}"


def _named(rows, name):
    return next(row for row in rows if row["name"] == name)


def _content(where, key):
    """Return what a kubeconfig names as a file, or has in itself."""
    if data := where.get(f"{key}-data"):
        return base64.b64decode(data).decode()
    return Path(where[key]).read_text() if key in where else None


def _tls(authority, user):
    context = ssl.create_default_context(cadata=authority)
    if certificate := _content(user, "client-certificate"):
        with tempfile.NamedTemporaryFile("w", suffix=".pem") as both:  # the ssl module reads files alone
            both.write(certificate + "\n" + _content(user, "client-key"))
            both.flush()
            context.load_cert_chain(both.name)
    return context


class Release:
    """One in a namespace of its own; each command may come from another helm."""

    def __init__(self, api: ApiServer, namespace: str, name: str = "r") -> None:
        self.api = api
        self.namespace = namespace
        self.name = name
        self._where = ("-n", namespace, "--kubeconfig", api.kubeconfig)

    def install(self, helm, values=None, *flags, files=()):
        return self._helm(helm, "install", values, *flags, files=files)

    def upgrade(self, helm, values=None, *flags, files=()):
        return self._helm(helm, "upgrade", values, *flags, files=files)

    def rollback(self, helm, revision):
        run(helm, "rollback", self.name, str(revision), *self._where)

    def uninstall(self, helm):
        run(helm, "uninstall", self.name, *self._where)

    def manifest(self, helm):
        """Return the objects of the last revision."""
        return [o for o in yaml.safe_load_all(run(helm, "get", "manifest", self.name, *self._where)) if o]

    def _helm(self, helm, verb, values, *flags, files):
        named = [part for path in files for part in ("-f", str(path))]
        images = {key: value for key, value in LEAST.items() if key != "acceptDrawnSecrets"}  # helm sees this cluster
        with least_values(images) as least:
            argv = [verb, self.name, str(CHART), *self._where, *least, *named, *flags, "-f", "-"]
            return run(helm, *argv, stdin=yaml.safe_dump(values or {}))

    def workload(self, component, kind="Deployment"):
        return self.api.made("GET", self._path(component, kind))

    def replicas(self, component, kind="Deployment"):
        return self.workload(component, kind)["spec"]["replicas"]

    def scale(self, component, replicas, kind="Deployment", *, who):
        """Change the number as a controller or `kubectl scale` does, through the subresource."""
        merge = "application/merge-patch+json"
        body = {"spec": {"replicas": replicas}}
        path = self._path(component, kind) + "/scale"
        self.api.made("PATCH", path, body, kind=merge, query={"fieldManager": who})

    def _path(self, component, kind):
        version = {"LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1"}.get(kind, "apps/v1")
        return self.api.path(version, kind, self.namespace, f"{self.name}-pdrelay-{component}")


def warnings(answer):
    """Return what the API warns of (RFC 7234: a code, an agent, the text in quotes)."""
    return [re.sub(r'^299 - "|"$', "", text) for text in answer.headers.get_list("warning")]

"""What people write into values: what is wrong is refused before it reaches a cluster, in words that help."""

import functools
import json
import math
import re

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.helm_care import gib
from support.helm_chart import CASES, CHART, HELMS, Chart, Refused, default
from support.helm_checks import complaints
from support.helm_objects import container, engine_pods, ident, kind, matches, pods, pool, router, templates
from support.helm_pods import drains
from support.helm_schemas import wrong

pytestmark = pytest.mark.processes


BAD = [
    ("replicas", 3),  # not at the top
    ("model.nmae", "m"),
    ("model.name", ""),
    ("model.name", 7),
    ("model.maxLength", 0),
    ("model.dtype", "float7"),
    ("model.volume.type", "nfs"),
    ("cache.size", "a lot"),
    ("connector.mode", "both"),
    ("connector.leaseSeconds", 0),
    ("connector.loadFailurePolicy", "retry"),
    ("connector.extraConfig.transfer_timeuot", 5),
    ("connector.extraConfig.kv_lease_duration", 5),  # leaseSeconds is
    ("connector.secret", "hunter2"),  # a secret, not its name
    ("connector.acceptOpenDataPlane", "yes"),
    ("prefill.runAsRoot", "no"),
    ("prefill.rdma.transports", "rc tcp"),
    ("kvEvents.enabled", "prefix"),
    ("timelines.enabled", "yes"),
    ("returnKv.enabled", "push"),
    ("onePool.enabled", "both"),
    ("connector.kvBoth", "decode"),
    ("prefill.kvEvents.from", [{"cidr": "10.0.0.0/8"}]),
    ("router.replicas", 0),
    ("router.replicas", "2"),
    ("router.port", 70000),
    ("router.settings.workers", 2),  # router.replicas are
    ("router.settings.retrys", 2),
    ("router.settings.retries", -1),
    ("router.settings.prefill_policy", "by chance"),
    ("router.settings.port", 9),  # router.port is
    ("router.settings.admin_key", "hunter2"),  # a secret
    ("router.settings.allowed_instances", "10.0.0.0/8"),  # router.allowedInstances is
    ("router.allowedInstances", "10.0.0.0/8"),
    ("router.allowedInstances", ["10.0.0.0/8, 11.0.0.0/8"]),
    ("router.discovery.prefill", ["10.0.0.1"]),
    ("router.discovery.decode", ["fd00::1:8200"]),  # [fd00::1]:8200 is an address and a port
    ("engine.resources.requests.memory", "32GB"),
    ("router.resources.limits.cpu", "half"),
    ("networkPolicy.adminFrom", [{}]),  # the API wants a peer to be something
    ("router.discovery.inferencePool", "ns/pool"),
    ("router.store.type", "etcd"),
    ("router.store.redisUrl", "redis://:hunter2@redis:6379"),  # a secret
    ("router.apiKeys.secretName", "My_Secret"),
    ("router.image.digest", "sha256:abc"),
    ("router.image.pullPolicy", "Sometimes"),
    ("router.service.type", "ExternalName"),
    ("router.service.ipFamilyPolicy", "Dual"),
    ("router.service.ipFamilies", ["IPv5"]),
    ("router.autoscaling.more", [{"metric": "pdrelay_requests_running"}]),
    ("disaggregatedSet.slices", 0),
    ("disaggregatedSet.placementPolicy.type", "Spread"),
    ("router.securityContext.privileged", True),
    ("router.securityContext.allowPrivilegeEscalation", True),
    ("router.pdb.maxUnavailable", "some"),
    ("prefill.kind", "DaemonSet"),
    ("prefill.replica", 2),
    ("prefill.tensorParallel", 0),
    ("prefill.pipelineParallel", 2),  # no real engine has been tried so
    ("decode.apiServers", 0),
    ("prefill.extraEnv", [{"value": "1"}]),
    ("prefill.securityContext.privileged", True),
    ("prefill.gpuMemoryUtilization", 1.5),
    ("prefill.shmSize", 16),
    ("prefill.tmpSize", "much"),
    ("prefill.hugepages.size", "4Mi"),
    ("prefill.accelerator.resource", "gpu"),
    ("decode.autoscaling.type", "vpa"),
    ("decode.autoscaling.metric", "model{name}"),
    ("decode.autoscaling.target", 4),
    ("decode.autoscaling.target", "0"),  # an HPA is refused by the API, and KEDA divides by it
    ("prefill.autoscaling.target", "0.0"),
    ("decode.autoscaling.more", [{"metric": "vllm:num_requests_running"}]),
    ("decode.autoscaling.perOther", 0),
    ("decode.probes.periodSeconds", 0),
    ("decode.topologySpread", [{"maxSkew": 1}]),
    ("networkPolicy.routerFrom", [{"cidr": "10.0.0.0/8"}]),
    ("monitoring.prometheusRule.errorShare", 5),
    ("monitoring.prometheusRule.ttftSeconds", 300),  # the histogram's last bound: above it nothing is seen
    ("ingress.paths", ["v1"]),
    ("ingress.hosts", []),
    ("ingress.hosts", ["LLM.example.com"]),  # what the API refuses
    ("httpRoute.hostnames", ["llm.example.com:443"]),
    ("commonLabels", {"team": "search and chat"}),
    ("decode.podLabels", {"tier": "-"}),
    ("decode.nodeSelector", {"gpu": "h200, h100"}),
    ("monitoring.podMonitor.labels", {"release": "a b"}),
    ("decode.pdb.maxUnavailable", "150%"),
    ("httpRoute.requestTimeout", "ever"),
    ("tests.seconds", -1),
    ("tests.apiKey", "hunter2"),  # a secret, not its name
    ("fullnameOverride", "PDRelay"),
    ("router.port", None),  # null takes the default away, and nothing can be in its place
    ("router.tls", None),
    ("ingress.hosts", None),
    ("router.replicas", None),
    ("connector.mode", None),
    ("engine.kind", None),
    ("engine.drain.shutdownSeconds", None),
    ("prefill.sidePort", None),
    ("decode.enabled", None),
    ("networkPolicy.enabled", None),
    ("fullnameOverride", "7b"),  # a Service's name begins with a letter
    ("router.image.repository", "registry.example.com/pdrelay/router:0.1.0"),  # its tag is router.image.tag
    ("engine.image.repository", "https://registry.example.com/pdrelay/engine"),
    ("prefill.image.repository", "registry.example.com/Engine"),
    ("model.aliases", ["--api-key"]),
    ("prefill.minReadySeconds", -1),
    ("router.minReadySeconds", "10"),
    ("decode.initContainers", [{"name": "copy"}]),
    ("decode.initContainers", [{"name": "tune", "image": "i", "securityContext": {"privileged": True}}]),
    ("decode.resourceClaims", [{"name": "gpu"}]),
    ("decode.resourceClaims", [{"name": "gpu", "resourceClaimTemplateName": "t", "count": 2}]),
    ("extraObjects", [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {}}]),
    ("revision", "a b"),
    ("listenAddress", "everywhere"),
]


def rounds():
    """Share out what is wrong, so that every round has it all in different places: one render tells of many."""
    shared = []
    for path, value in BAD:
        fitting = next((one for one in shared if path not in one), None)
        if fitting is None:
            shared.append(fitting := {})
        fitting[path] = value
    return shared


def merged(paths):
    values = {}
    for path, value in paths.items():
        *parents, last = path.split(".")
        node = values
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = value
    return values


@functools.cache
def complaint(helm, number):
    with pytest.raises(Refused) as refusal:
        Chart().text(merged(rounds()[number]), helm=helm)
    return str(refusal.value).splitlines()


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize(("path", "value"), BAD, ids=lambda one: str(one)[:40])
def test_a_value_that_cannot_be_is_refused_by_name(path, value, helm):
    """The schema knows every key, and both helms' validators say which."""
    number = next(i for i, one in enumerate(rounds()) if one.get(path) is value)

    assert [line for line in complaint(helm, number) if all(key in line for key in path.split("."))]


LOCKED = {"networkPolicy": {"egress": {"enabled": True}}}
ACCEPTED = {"connector": {"acceptOpenDataPlane": True}}
OUTSIDE = {"enabled": True, "routerTo": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}
KEYED = {"apiKey": {"secretName": "engines"}}
RETURNING = {"returnKv": {"enabled": True}}
TURNING = {"router": {"settings": {"roles": "auto", "target_ttft_s": 2, "target_itl_s": 0.05}}}
ONE_POOL, NO_PREFILL = {"onePool": {"enabled": True}}, {"prefill": {"enabled": False}}
TELLING = {"kvEvents": {"enabled": True}, "prefill": KEYED, "decode": KEYED}
GROUP = {"kind": "LeaderWorkerSet", "nodes": 2}
ON_NODES = {"prefill": {**GROUP, "hostNetwork": True, "tensorParallel": 2}, **ACCEPTED}
SPREAD = {"maxSkew": 1, "topologyKey": "z", "whenUnsatisfiable": "DoNotSchedule"}
SCRAPED = {"monitoring": {"podMonitor": {"enabled": True}}}
CONTRADICTIONS = [
    ({"router": {"store": {"type": "memory"}}}, "one router's own"),
    ({"router": {"store": {"type": "redis"}}}, "redis://HOST:PORT"),
    ({"router": {"store": {"type": "redis", "redisUrl": "redis://r?password=x"}}}, "write PDRELAY_REDIS_PASSWORD"),
    ({"router": {"serviceAccount": {"create": False}}}, "router.serviceAccount.name is empty"),
    ({"engineServiceAccount": {"create": False}}, "engineServiceAccount.name is empty"),
    (
        {"router": {"adminKey": {"secretName": "s", "key": "k"}, "apiKeys": {"secretName": "s", "key": "k"}}},
        "operators",
    ),
    ({"router": {"tls": {"clientCaSecretName": "ca"}}}, "needs router.tls.secretName"),
    ({"router": {"terminationGracePeriodSeconds": 60}}, "its drain takes up to 145 s"),
    ({"router": {"strategy": {"rollingUpdate": {"maxSurge": 0}}}}, "no pod could be replaced"),
    ({"engine": {"extraEnv": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}}, "has A twice"),
    (
        {"decode": {"strategy": {"rollingUpdate": {"maxSurge": "0%", "maxUnavailable": 0}}}},
        "decode.strategy: maxSurge and maxUnavailable are both 0",
    ),
    (
        {"engine": {"kind": "LeaderWorkerSet", "strategy": {"rollingUpdate": {"maxSurge": 1}}}},
        "it has type and rollingUpdateConfiguration",
    ),
    ({"prefill": {"kind": "LeaderWorkerSet", "strategy": {"type": "Recreate"}}}, "prefill.strategy.type is Recreate"),
    ({"router": {"discovery": {"enabled": False}}}, "would know no engine"),
    ({"router": {"autoscaling": {"min": 5, "max": 4}}}, "above max"),
    ({"prefill": {"autoscaling": {"type": "hpa", "min": 0}}}, "no metric of a pool without engines"),
    ({"decode": {"autoscaling": {"type": "keda", "min": 0}}} | SCRAPED, "no metric of a pool without engines"),
    ({"listenAddress": "127.0.0.1"}, "no probe and no other pod reaches it there"),
    ({"listenAddress": "::1"}, "no probe and no other pod reaches it there"),
    (
        {
            "listenAddress": "::",
            "router": {"service": {"ipFamilies": ["IPv6", "IPv4"], "ipFamilyPolicy": "SingleStack"}},
        },
        "names two families",
    ),
    ({"prefill": {"terminationGracePeriodSeconds": 30}}, "its drain takes up to 360 s"),
    ({"decode": {"terminationGracePeriodSeconds": 599}}, "its drain takes up to 600 s"),
    ({"connector": {"leaseSeconds": 14}}, "when the KV is gone"),
    ({"router": {"settings": {"connect_timeout_s": 11}}}, "when the KV is gone"),
    ({"prefill": {"nodes": 2, "tensorParallel": 2}}, "only a LeaderWorkerSet"),
    ({"prefill": {"kind": "LeaderWorkerSet", "nodes": 3, "tensorParallel": 8}}, "cannot be divided"),
    ({"prefill": {"nodes": 2, "dataParallel": 2}}, "only a LeaderWorkerSet has several pods for one engine"),
    ({"decode": {**GROUP, "dataParallel": 2}}, "ranks over several pods have not been tried"),
    ({"decode": {**GROUP, "tensorParallel": 2, "extraArgs": ["--api_server_count=1"]}}, "write decode.apiServers"),
    ({"prefill": {**GROUP, "tensorParallel": 2, "groupPort": 8100}}, "groupPort 8100"),
    (
        ON_NODES | {"decode": {**GROUP, "hostNetwork": True, "tensorParallel": 2, "groupPort": 29501}},
        "port 29501 is of",
    ),
    ({"prefill": {"port": 5600}}, "share a port"),
    ({"prefill": {"sidePort": 5550, "dataParallel": 8, "kvEvents": {"enabled": True}}}, "share a port"),
    ({"prefill": {"sidePort": 65530, "dataParallel": 8}}, "above 65535"),
    ({"prefill": {"hostNetwork": True, "port": 8200}, "decode": {"hostNetwork": True}} | ACCEPTED, "port 8200"),
    ({"prefill": {"hostNetwork": True}}, "prefill.hostNetwork is true: no NetworkPolicy applies there"),
    ({"decode": {"hostNetwork": True}}, "decode.hostNetwork is true: no NetworkPolicy applies there"),
    ({"networkPolicy": {"enabled": False}}, "write connector.acceptOpenDataPlane: true"),
    ({"router": {"discovery": {"enabled": False, "inferencePool": "llm"}}}, "needs router.discovery.enabled"),
    ({"connector": {"secret": {"create": False}}}, "engines refuse a side channel without a secret"),
    (
        {"decode": {"hostNetwork": True, "kvEvents": {"enabled": True}}} | ACCEPTED,
        "decode.kvEvents.enabled is true: vLLM publishes without a key",
    ),
    (
        {"prefill": {"kvEvents": {"enabled": True}}, "networkPolicy": {"enabled": False}} | ACCEPTED,
        "prefill.kvEvents.enabled is true: vLLM publishes without a key",
    ),
    (RETURNING | {"router": {"settings": {"decode_policy": "least_loaded"}}}, "decode_policy is least_loaded"),
    (RETURNING | {"connector": {"loadFailurePolicy": "fail"}}, "would ask no decode engine"),
    (RETURNING | {"connector": {"bufferDevice": "cpu", "mode": "push"}}, "does not go through host memory"),
    ({"kvEvents": {"enabled": True}}, "name a secret in prefill.apiKey.secretName"),
    ({"kvEvents": {"enabled": True}, "prefill": {"enabled": False}}, "name a secret in decode.apiKey.secretName"),
    (RETURNING | {"connector": {"mode": "push", "extraConfig": {"host_staging": True}}}, "KV goes through host memory"),
    (RETURNING | {"decode": {"extraArgs": ["--no-enable-prefix-caching"]}}, "has --no-enable-prefix-caching"),
    (RETURNING | {"router": {"settings": {"return_kv": False}}}, "router.settings.return_kv is false"),
    (TELLING | {"prefill": {**KEYED, "kvEvents": {"enabled": True}}}, "are both true"),
    (
        TELLING | {"decode": {**KEYED, "extraEnv": [{"name": "VLLM_PLUGINS", "value": "pdrelay"}]}},
        "name pdrelay,pdrelay_kv_events, too",
    ),
    (
        TELLING | {"router": {"settings": {"prefill_policy": "session", "decode_policy": "power_of_two"}}},
        "no policy of router.settings remembers what engines have cached",
    ),
    (
        {"router": {"settings": {"prefill_policy": "expected_ttft", "decode_policy": "prefix"}}},
        "expected_ttft chooses both engines: write it for both",
    ),
    ({"prefill": {"autoscaling": {"min": 9}}}, "above max"),
    ({"cache": {"type": "pvc"}}, "cache.claimName is empty"),
    ({"model": {"name": "/models", "volume": {"type": "image"}}}, "model.volume.image is empty"),
    ({"model": {"volume": {"type": "pvc", "claimName": "m"}}}, "it is looked for on the volume alone"),
    ({"model": {"name": "/modelsx/m", "volume": {"type": "pvc", "claimName": "m"}}}, "a path in /models"),
    ({"httpRoute": {"enabled": True}}, "name the gateway"),
    ({"router": {"store": {"type": "redis", "redisUrl": "redis://r:6379"}}, **LOCKED}, "keeps routers from Redis"),
    ({"prefill": {"hostNetwork": True}, "decode": {"hostNetwork": True}, **LOCKED}, "on their nodes' network"),
    (
        {"decode": {"hostNetwork": True}, "networkPolicy": {"egress": OUTSIDE}} | ACCEPTED,
        "networkPolicy.egress.engineTo",
    ),
    ({"router": {"discovery": {"prefill": ["10.0.0.7:8100"]}}, **LOCKED}, "outside of the release"),
    (LOCKED, "keeps engines from the model hub"),
    ({"prefill": {"autoscaling": {"wanted": True}}}, "write prefill.autoscaling.type: keda and monitoring"),
    (
        {
            "decode": {"autoscaling": {"wanted": True, "type": "keda"}},
            "monitoring": {"podMonitor": {"enabled": True}, "serviceMonitor": {"enabled": True}},
        },
        "no router counts engines: write router.settings.roles: dry-run",
    ),
    (TURNING | {"returnKv": {"enabled": False}}, "so no engine can turn: write connector.kvBoth: true"),
    (ONE_POOL, "its engines are those of decode, so write prefill.enabled: false"),
    (ONE_POOL | NO_PREFILL, "no router gives its engines their roles: write router.settings.roles: auto"),
    (
        TURNING | ONE_POOL | NO_PREFILL | {"decode": {"dataParallel": 2}},
        "decode.dataParallel is 2: ranks of one",
    ),
    (
        TURNING | ONE_POOL | NO_PREFILL | {"decode": {"autoscaling": {"type": "hpa"}}},
        "decode.autoscaling.type is hpa: no metric of one engine says",
    ),
    (
        TURNING
        | ONE_POOL
        | NO_PREFILL
        | {"decode": {"autoscaling": {"type": "keda"}}, "monitoring": {"podMonitor": {"enabled": True}}},
        "so write decode.autoscaling.wanted: true",
    ),
    (TURNING | RETURNING | {"prefill": {"autoscaling": {"type": "hpa"}}}, "prefill.autoscaling.type is hpa: pods that"),
    (
        TURNING
        | RETURNING
        | {"decode": {"autoscaling": {"type": "keda"}}, "monitoring": {"podMonitor": {"enabled": True}}},
        "decode.autoscaling.type is keda: pods that have turned",
    ),
    ({"prefill": {"autoscaling": {"type": "keda"}}}, "write monitoring.podMonitor.enabled: true"),
    ({"prefill": {"extraArgs": ["--ssl-keyfile", "/tls/tls.key"]}}, "prefill.extraArgs has --ssl-keyfile: routers"),
    ({"decode": {"extraArgs": ["--ssl-certfile=/tls/tls.crt"]}}, "decode.extraArgs has --ssl-certfile: routers"),
    ({"decode": {"extraArgs": ["--uds", "/run/vllm"]}}, "decode.extraArgs has --uds: routers"),
    (
        {"decode": {"extraArgs": ["--enable-ssl-refresh"]}},
        "so the pod would never be ready; write engineTls.secretName",
    ),
    (
        {"engineTls": {"secretName": "t", "requireClientCertificates": True}},
        "engines would refuse every router, so name the engines' certificate in engineTls.secretName and the routers'",
    ),
    ({"engineTls": {"clientSecretName": "c", "requireClientCertificates": True}}, "engines would refuse every router"),
    (
        {
            "engineTls": {"secretName": "t", "clientSecretName": "c", "requireClientCertificates": True},
            "monitoring": {"podMonitor": {"enabled": True}},
        },
        "Prometheus needs a certificate to show to engines, so write monitoring.podMonitor.tlsConfig",
    ),
    ({"prefill": {"kind": "LeaderWorkerSet", "minReadySeconds": 5}}, "a LeaderWorkerSet has no such field"),
    ({"decode": {"extraArgs": ["--ssl_ca_certs", "/tls/ca.crt"]}}, "decode.extraArgs has --ssl-ca-certs: routers"),
    ({"prefill": {"extraArgs": ["--pipeline-parallel-size=2"]}}, "--pipeline-parallel-size: no real engine has been"),
    ({"decode": {"extraArgs": ["-pp", "2"]}}, "decode.extraArgs has -pp: no real engine has been tried"),
    (
        {"prefill": {"extraArgs": ["--port=9"]}},
        "prefill.extraArgs has --port, which the chart sets itself: write prefill.port",
    ),
    (
        {"engine": {"extraArgs": ["--max_model_len=9"]}},
        "has --max-model-len, which the chart sets itself: write model.maxL",
    ),
    ({"prefill": {"extraArgs": ["--kv-transfer-config", "{}"]}}, "write values below connector"),
    ({"prefill": {"extraArgs": ["--kv-transfer-config.kv_role=kv_both"]}}, "write values below connector"),
    ({"prefill": {"extraArgs": ["-tp", "2"]}}, "prefill.extraArgs has -tp, which the chart sets itself"),
    ({"prefill": {"extraArgs": ["-q", "fp8"]}}, "prefill.extraArgs has the short flag -q: write the long one"),
    ({"decode": {"extraArgs": ["--data-parallel-start-rank=8"]}}, "write decode.dataParallel"),
    ({"decode": {"extraArgs": ["--master-port", "1"]}}, "write decode.groupPort"),
    (
        {"prefill": {"extraEnv": [{"name": "HF_TOKEN", "value": "hunter2"}]}},
        "HF_TOKEN with a value, which everybody can",
    ),
    (
        {"router": {"extraEnv": [{"name": "ADMIN_API_KEY", "value": "hunter2"}]}},
        "router.extraEnv has ADMIN_API_KEY with",
    ),
    ({"decode": {"topologySpread": [SPREAD | {"labelSelector": {}}]}}, "the chart adds that of the pods"),
    ({"prefill": {"initContainers": [{"name": "engine", "image": "i"}]}}, "that of a container of the chart"),
    (
        {"extraObjects": [{"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}}]},
        "has the Secret s: values are",
    ),
    (
        {"router": {"settings": {"prefill_policy": "prefx"}}},
        "router.settings.prefill_policy is prefx, which is no policy",
    ),
    (
        {"router": {"settings": {"decode_policy": "prefix-tree"}}},
        "name one that a package in your image adds in router.p",
    ),
    ({"router": {"service": {"type": "LoadBalancer"}}}, "router.service.type is LoadBalancer, and clients need no key"),
    ({"router": {"service": {"type": "NodePort"}}}, "router.service.type is NodePort, and clients need no key"),
    ({"ingress": {"enabled": True}}, "ingress.enabled is true, and clients need no key"),
    ({"httpRoute": {"enabled": True, "parentRefs": [{"name": "g"}]}}, "httpRoute.enabled is true, and clients need no"),
    ({"router": {"image": {"repository": ""}}}, "router.image.repository is empty: the project publishes no images"),
    (
        {"router": {"image": {"repository": "localhost/pdrelay/router"}}},
        "localhost/pdrelay/router, which no node can pull",
    ),
    ({"engine": {"image": {"repository": ""}}}, "decode.image.repository is empty: the project publishes no images"),
    ({"prefill": {"image": {"repository": "localhost/e"}}}, "name that in engine.image (or prefill.image).repository"),
    ({"router": {"service": {"ipFamilies": ["IPv6"]}}}, "router.service wants IPv6, and listenAddress is 0.0.0.0"),
    ({"router": {"service": {"ipFamilyPolicy": "PreferDualStack"}}}, "wants IPv6, and listenAddress is 0.0.0.0"),
    (
        {"router": {"autoscaling": {"type": "keda", "more": [{"metric": "pdrelay_requests_running", "target": "9"}]}}},
        "router.autoscaling.more asks Prometheus: write monitoring.serviceMonitor.enabled: true",
    ),
]


OFFLINE = {"extraEnv": [{"name": "HF_HUB_OFFLINE", "value": "1"}]}


@pytest.mark.parametrize(
    "values",
    [
        {"networkPolicy": {"egress": {"enabled": True, "engineTo": [{"ipBlock": {"cidr": "0.0.0.0/0"}}]}}},
        {"model": {"name": "/models/m", "volume": {"type": "pvc", "claimName": "m"}}, **LOCKED},
        {"model": {"name": "/mine/m"}, **LOCKED},
        {"prefill": OFFLINE, "decode": OFFLINE, "cache": {"type": "pvc", "claimName": "c"}, **LOCKED},
    ],
    ids=["the hub is named", "on a volume", "a path", "in the cache"],
)
def test_engines_that_need_no_model_hub_may_be_kept_from_it(values):
    """The check above asks for nothing that is not needed."""
    assert complaints(Chart().objects(values)) == []


@pytest.mark.parametrize(("values", "sentence"), CONTRADICTIONS, ids=lambda one: str(one)[:60])
@pytest.mark.slow  # a hundred renderings; make test-helm has them
def test_values_that_contradict_each_other_are_refused_in_a_sentence(values, sentence):
    """Each would be a pod that never starts, a lost request, or a hole."""
    with pytest.raises(Refused) as refusal:
        Chart().text(values)

    assert sentence in str(refusal.value)


def test_every_object_of_the_schema_is_closed_and_every_default_is_in_it():
    """A key that nobody reads is a mistake of whoever writes it."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    assert list(_open(schema, schema, values, "")) == []


FREE = ("affinity", "strategy", "podSecurityContext", "securityContext", "resources", "tlsConfig")  # Kubernetes' own


def _open(schema, node, values, path):
    node = schema["definitions"][node["$ref"].rsplit("/", 1)[1]] if "$ref" in node else node
    if not isinstance(values, dict) or path.rsplit(".", 1)[-1] in FREE:
        return
    if node.get("additionalProperties", True) is True:
        yield f"{path} is open"
    for key, value in values.items():
        if "properties" in node and key not in node["properties"]:
            yield f"{path}.{key} is not in the schema"
        elif "properties" in node:
            yield from _open(schema, node["properties"][key], value, f"{path}.{key}")


def selectors_of(objects):
    return [(o, o["spec"]["selector"]) for o in kind(objects, "Deployment")]


NAMES = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,24}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,22}[a-z0-9])?)?", fullmatch=True)
FEW = settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))


@FEW
@given(first=NAMES, second=NAMES | st.just("pdrelay"), nested=st.booleans())
def test_two_releases_in_one_namespace_share_nothing(first, second, nested):
    """Neither a name nor a pod, also when one is called as the other's objects are."""
    second = f"{first[:20].rstrip('-.')}-pdrelay-router" if nested else second
    if first == second:
        return
    one, two = (Chart().objects(ci=None, release=release) for release in (first, second))

    assert not {ident(o) for o in one} & {ident(o) for o in two}
    assert complaints(one) + complaints(two) == []
    for mine, others in ((one, two), (two, one)):
        for o, selector in selectors_of(mine):
            assert not [meta for _, meta, _ in pods(others) if matches(selector, meta["labels"])], ident(o)


@pytest.mark.parametrize("word", ["y", "off", "null", "123", "1e3", "0x1f"])
def test_a_name_that_looks_like_something_else_stays_a_name(word):
    """YAML reads a bare y as true and 123 as a number, and Kubernetes then refuses the label."""
    classes = {"priorityClassName": word}
    values = {
        "nameOverride": word,
        "ingress": {"enabled": True, "className": word},
        "router": {"apiKeys": {"secretName": word}, **classes},
        "engine": {**classes, "schedulerName": word, "runtimeClassName": word},
        "prefill": {"apiKey": {"secretName": word, "key": word}, "colocate": {"enabled": True, "topologyKey": word}},
    }
    objects = Chart().objects(values, ci="2p4d", release=word, namespace=word)

    assert complaints(objects) == []
    assert [problem for o in objects for problem in wrong(o, "1.33.0")] == []
    assert {o["metadata"]["labels"]["app.kubernetes.io/instance"] for o in objects} == {word}
    assert {o["metadata"]["namespace"] for o in objects} == {word}


def test_releases_whose_names_differ_by_a_dot_or_a_first_digit_share_nothing():
    """Helm takes any of them; a Service takes neither a dot nor a digit at the beginning."""
    named = [Chart().objects(release=release) for release in ("a.b", "a-b", "1a", "r1a")]

    assert [complaints(one) for one in named] == [[], [], [], []]
    assert len({ident(o) for one in named for o in one}) == sum(map(len, named))


def test_a_release_called_as_the_chart_keeps_a_short_name():
    """And it meets no other: every other name ends with the chart's."""
    assert router(Chart().objects(release="pdrelay"))["metadata"]["name"] == "pdrelay-router"
    assert router(Chart().objects(release="a-pdrelay"))["metadata"]["name"] == "a-pdrelay-pdrelay-router"


SECONDS = st.integers(0, 2000)


@FEW
@given(
    pre=SECONDS,
    grace=SECONDS,
    shutdown=st.integers(1, 2000),
    margin=st.integers(10, 60),
    settle=SECONDS,
    requests=SECONDS,
    lease=st.floats(26, 900),
    own=st.none() | st.integers(1, 9000),
)
def test_nobody_is_killed_before_everything_took_as_long_as_it_may(
    pre, grace, shutdown, margin, settle, requests, lease, own
):
    """Whatever the values: the arithmetic holds, or the chart is refused."""
    engine = {"settleSeconds": settle, "requestSeconds": requests, "shutdownSeconds": shutdown, "marginSeconds": margin}
    drain = {"preStopSeconds": pre, "graceSeconds": grace, "shutdownSeconds": shutdown, "marginSeconds": margin}
    values = {
        "connector": {"leaseSeconds": lease},
        "router": {"drain": drain},
        "prefill": {"drain": engine, "terminationGracePeriodSeconds": own},
        "decode": {"drain": engine},
    }
    least = settle + requests + math.ceil(lease) + shutdown + margin
    if own is not None and own < least:
        with pytest.raises(Refused, match=f"its drain takes up to {least} s"):
            Chart().objects(values)
        return
    objects = Chart().objects(values)

    assert drains(objects) == []
    hook = container(templates(pool(objects, "prefill"))[0])["lifecycle"]["preStop"]["exec"]["command"]
    assert f"--seconds={settle + requests + math.ceil(lease)}" in hook


@pytest.mark.parametrize("case", CASES)
def test_an_engine_that_hangs_is_not_drained(case):
    """Its hook would wait for an answer as long as for the longest stream: ten minutes, and an accelerator."""
    for role, template in engine_pods(default(case)):
        c = container(template)
        whole = template["spec"]["terminationGracePeriodSeconds"]
        short = [c[probe]["terminationGracePeriodSeconds"] for probe in ("startupProbe", "livenessProbe") if probe in c]
        assert all(0 < one <= whole / 10 for one in short), role
        assert "terminationGracePeriodSeconds" not in c.get("readinessProbe", {})  # the API refuses it there


def test_prefill_and_decode_share_no_setting():
    """All that one may choose for the one, it may choose otherwise for the other."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    other = {
        "replicas": 7, "tensorParallel": 4, "priorityClassName": "high", "pdb": {"maxUnavailable": 3},
        "autoscaling": {"type": "hpa"}, "resources": {"requests": {"cpu": "9"}}, "strategy": {"type": "Recreate"},
    }  # fmt: skip

    before, after = Chart().objects(), Chart().objects({"prefill": other})

    assert values["prefill"].keys() == values["decode"].keys()
    assert templates(pool(before, "decode")) == templates(pool(after, "decode"))
    assert pool(before, "decode") == pool(after, "decode")
    assert templates(pool(before, "prefill")) != templates(pool(after, "prefill"))


MUST_FIT = [  # what makes KV of one engine useless to another, or keeps them from meeting
    {"prefill": {"image": {"tag": "2"}}},
    {"decode": {"image": {"digest": "sha256:" + "0" * 64}}},
    {"model": {"name": "other"}},
    {"model": {"aliases": ["other"]}},
    {"prefill": {"initContainers": [{"name": "patch", "image": "i"}]}},
    {"model": {"dtype": "half"}},
    {"model": {"blockSize": 32}},
    {"connector": {"bufferDevice": "cpu"}},
    {"connector": {"extraConfig": {"host_staging": False}}},
    {"connector": {"secret": {"name": "s"}}},
    {"prefill": {"extraArgs": ["--kv-cache-dtype", "fp8"]}},
    {"decode": {"extraArgs": ["--kv-cache-dtype", "fp8"]}},
    {"prefill": {"extraEnv": [{"name": "VLLM_KV_CACHE_LAYOUT", "value": "HND"}]}},
    {"decode": {"extraEnv": [{"name": "VLLM_ATTENTION_BACKEND", "value": "FLASHINFER"}]}},
]
ALONE = [{"decode": {"replicas": 5}}, {"prefill": {"tensorParallel": 2}}, {"router": {"image": {"tag": "2"}}}]


def revision(chart, values=None):
    """Return the one revision that the pods of both pools have."""
    marked = re.findall(r"pdrelay/revision: (\S+)", chart.text(values))
    assert (len(marked), len(set(marked))) == (2, 1)
    return marked[0]


def test_what_must_fit_on_both_sides_makes_a_new_revision_of_both():
    """A prefill engine of the old one is never paired with a decode engine of the new one; each change is another."""
    found = [revision(Chart(), values) for values in [None, *MUST_FIT]]

    assert len(set(found)) == len(found)
    assert {revision(Chart(), values) for values in ALONE} == {found[0]}
    assert revision(Chart(), {"revision": "mine", **MUST_FIT[0]}) == "mine"


def test_a_variable_of_the_values_takes_the_place_of_the_chart_s():
    """Helm 4 applies on the server, which refuses two of one name; helm 3 warns, and the last one counts."""
    own = ["HOME", "USER", "UCX_TLS", "HF_HUB_OFFLINE", "VLLM_HOST_IP", "VLLM_CACHE_ROOT", "VLLM_NO_USAGE_STATS"]
    values = {
        "model": {"name": "/models/m", "volume": {"type": "pvc", "claimName": "c"}},
        "engine": {
            "rdma": {"enabled": True},
            "runAsRoot": False,
            "extraEnv": [{"name": name, "value": "mine"} for name in own],
        },
        "router": {"extraEnv": [{"name": "PDRELAY_ROUTER", "value": "mine"}]},
    }

    for _, _, spec in pods(Chart().objects(values)):
        variables = container({"spec": spec}).get("env", [])
        names = [one["name"] for one in variables]
        assert len(names) == len(set(names))
        assert {one["value"] for one in variables if one["name"] in (*own, "PDRELAY_ROUTER")} <= {"mine"}


def empties(values, path=()):
    """Yield the paths of defaults that are empty."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from empties(value, (*path, key))
        elif value in ("", [], {}):
            yield ".".join((*path, key))


def test_null_is_the_same_as_empty():
    """It is how helm takes a default away, and what a templating tool writes for a variable that is not set."""
    least = ("router.image.repository", "engine.image.repository")
    paths = [path for path in empties(yaml.safe_load((CHART / "values.yaml").read_text())) if path not in least]

    assert Chart().objects(merged(dict.fromkeys(paths))) == list(default())


def test_routers_may_all_be_replaced_at_once():
    """Kubernetes refuses Recreate beside rollingUpdate, which the chart's default has."""
    assert router(Chart().objects({"router": {"strategy": {"type": "Recreate"}}}))["spec"]["strategy"] == {
        "type": "Recreate"
    }


def test_a_router_asks_for_no_more_cpu_than_it_may_have():
    """A limit alone is the request as well, as for any container; the API refuses a request above it."""
    less = Chart().objects({"router": {"resources": {"limits": {"cpu": "500m"}}}})
    resources = container(templates(router(less))[0])["resources"]

    assert "cpu" not in resources["requests"]
    assert resources["limits"]["cpu"] == "500m"


@pytest.mark.parametrize("case", CASES)
def test_every_container_of_the_chart_has_limits_where_nobody_can_set_them(case):
    """A namespace whose quota counts limits refuses a pod with a container that has none."""
    small = [
        c for _, _, spec in pods(default(case)) for c in spec.get("initContainers", ()) if c["name"] == "kv-events"
    ]
    small += [container(o) for o in kind(default(case), "Pod")]

    assert [c["name"] for c in small if c["resources"]["limits"].keys() != {"cpu", "memory", "ephemeral-storage"}] == []


def test_a_router_asks_for_a_core():
    """It can use one; what is said of it overrides that."""
    said = Chart().objects({"router": {"resources": {"requests": {"cpu": "1500m"}}}})
    one, other = (container(templates(router(objects))[0])["resources"]["requests"] for objects in (default(), said))

    assert (one["cpu"], other["cpu"]) == ("1", "1500m")
    assert one["memory"] == "512Mi"


@pytest.mark.parametrize("case", CASES)
def test_a_model_that_is_downloaded_fits_where_it_goes(case):
    """Two bytes a parameter, by the number in its name; a pod that writes more than it asked for is evicted first."""
    for role, template in engine_pods(default(case)):
        c = container(template)
        volumes = {v["name"]: v for v in template["spec"]["volumes"]}
        billions = re.search(r"([\d.]+)[bB]\b", c["args"][1])
        if "model" in volumes or not billions:
            continue
        needed = float(billions[1]) * 2e9 / 2**30
        room, asked = volumes["cache"]["emptyDir"]["sizeLimit"], c["resources"]["requests"]["ephemeral-storage"]
        assert gib(room) >= gib(asked) - 8 >= needed, (case, role)


def test_nobody_replaces_what_the_chart_itself_goes_by():
    """Labels of one's own go on top of selectors, roles and ports, never in their place; and they do arrive."""
    own = {"app.kubernetes.io/component": "x", "app.kubernetes.io/instance": "y", "team": "a"}
    pod = {"pdrelay/role": "decode", "pdrelay/revision": "z", "pdrelay/release": "q", "tier": "gpu"}
    values = {"commonLabels": own, "prefill": {"podLabels": pod}, "router": {"podLabels": own}}
    objects = Chart().objects(values)

    assert complaints(objects) == []
    assert {o["metadata"]["labels"]["team"] for o in objects} == {"a"}
    assert templates(pool(objects, "prefill"))[0]["metadata"]["labels"]["tier"] == "gpu"


def test_an_address_of_the_other_family_is_listened_on():
    """Clusters with IPv6 alone."""
    objects = Chart().objects({"listenAddress": "::"})

    assert complaints(objects) == []
    assert all("::" in container(templates(o)[0])["args"] for o in kind(objects, "Deployment"))

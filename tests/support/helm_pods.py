"""Checks of pods: probes, security, arguments, ports, and how they end. See helm_checks.py."""

import json
import math
import re

from pdrelay_connector.settings import read_settings
from pdrelay_proxy.cli import build_parser
from pdrelay_proxy.core.http.origins import check_open
from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.features.peers.settings import PeerSettings
from pdrelay_proxy.options import serve_settings
from support.helm_chart import DRAWN
from support.helm_objects import (
    COMPONENT,
    PROBES,
    container,
    engine_pods,
    env,
    flag,
    ident,
    kind,
    pods,
    pool,
    pools,
    router,
    templates,
)  # fmt: skip

MARGIN_S = 10  # seconds that must be left when everything took as long as it may


def probes(objects):
    """Routers and engines are probed for all three things; a router is not restarted for lack of engines."""
    problems = []
    served = [("router", container(templates(router(objects))[0]))]
    served += [(role, container(template)) for role, template in engine_pods(objects)]
    for name, c in served:
        problems += [f"{name} has no {probe}" for probe in PROBES if probe not in c]
        if any(probe not in c for probe in PROBES):
            continue
        paths = {probe: c[probe].get("httpGet", {}).get("path") for probe in PROBES}
        if name == "router" and {paths["startupProbe"], paths["livenessProbe"]} & {"/health", "/ready"}:
            problems.append("router is restarted when there are no engines")
        if name == "router" and "admin" in {port["name"] for port in c["ports"]}:
            asked = {(c[probe].get("httpGet", {}).get("port"), paths[probe]) for probe in PROBES}
            if asked != {("admin", "/live"), ("admin", "/ready")}:
                problems.append(f"router is probed at {sorted(asked, key=str)}, and has an admin port")
        if name == "router" and paths["readinessProbe"] not in ("/ready", None):
            problems.append(f"router is ready by {paths['readinessProbe']}")
        asks = {
            probe: c[probe].get("exec", {}).get("command", ["", ""])[1] == "/opt/pdrelay/health.py" for probe in PROBES
        }
        if name != "router" and any(paths[probe] != "/health" and not asks[probe] for probe in PROBES):
            problems.append(f"{name} is probed at {sorted(map(str, paths.values()))}")
        patience = {p: c[p]["periodSeconds"] * c[p]["failureThreshold"] for p in PROBES}
        if patience["livenessProbe"] <= patience["readinessProbe"]:
            problems.append(f"{name} is restarted before it is taken out")
    return problems


def security(objects):
    """Routers (and the test) are restricted; engines are root for RDMA alone, and share the node's network at most."""
    problems = []
    for o, meta, spec in pods(objects):
        problems += [
            f"{ident(o)} has {key}" for key in ("hostIPC", "hostPID", "shareProcessNamespace") if spec.get(key)
        ]
        pod = spec.get("securityContext", {})
        for c in spec["containers"]:
            own = c.get("securityContext", {})
            capabilities = own.get("capabilities", {})
            if own.get("allowPrivilegeEscalation") is not False or own.get("privileged"):
                problems.append(f"{ident(o)} may gain privileges")
            if capabilities.get("drop") != ["ALL"]:
                problems.append(f"{ident(o)} keeps capabilities")
            if (own.get("seccompProfile") or pod.get("seccompProfile", {})).get("type") != "RuntimeDefault":
                problems.append(f"{ident(o)} has no seccomp profile")
            added = set(capabilities.get("add", ()))
            users = _engine_user if meta["labels"][COMPONENT] in ("prefill", "decode") else _other_user
            problems += [f"{ident(o)} {said}" for said in users(pod, own, added)]
        if meta["labels"][COMPONENT] != "router" and spec.get("automountServiceAccountToken") is not False:
            problems.append(f"{ident(o)} gets a token of the API")
    return problems


def _engine_user(pod, _own, added):
    if added - {"IPC_LOCK"}:
        yield f"adds {added}"
    chosen = [pod.get(key) for key in ("runAsUser", "fsGroup")]  # or the platform chooses both: OpenShift
    if not added and not (pod.get("runAsNonRoot") and (all(chosen) or chosen == [None, None])):
        yield "is root, or cannot write to its volumes"


def _other_user(pod, own, added):
    restricted = pod.get("runAsNonRoot") and pod.get("runAsUser") != 0 and own.get("readOnlyRootFilesystem")
    if added or not restricted:
        yield "is not restricted: root, a writable root, or capabilities"


def secrets(objects):
    """No secret is written down, neither as an object, nor as a value, nor as an argument: one may be drawn."""
    problems = [
        f"{ident(o)} is a secret in the chart" for o in kind(objects, "Secret") if o["data"] != {"secret": DRAWN}
    ]
    for o, _, spec in pods(objects):
        for c in spec["containers"]:
            for entry in c.get("env", ()):
                is_path = entry["name"].endswith("_FILE") and entry.get("value", "").startswith("/etc/pdrelay/")
                if (
                    re.search(r"KEY|TOKEN|SECRET|PASSWORD", entry["name"])
                    and not is_path
                    and "secretKeyRef" not in entry.get("valueFrom", {})
                ):
                    problems.append(f"{ident(o)}: {entry['name']} is not a reference to a secret")
            problems += [
                f"{ident(o)}: {arg} in its arguments" for arg in c.get("args", ()) if arg.startswith("--api-key=")
            ]
    return problems


def connector_secret(objects):
    """All pods of engines read one secret from a file; if the chart makes it, it is the one that they mount."""
    problems = []
    mounted = set()
    for role in pools(objects):
        for template in templates(pool(objects, role)):
            path = env(template).get("PDRELAY_CONNECTOR_SECRET_FILE", {}).get("value", "")
            mounts = {m["mountPath"]: m["name"] for m in container(template)["volumeMounts"]}
            volumes = {v["name"]: v for v in template["spec"]["volumes"]}
            secret = volumes.get(mounts.get(path.rpartition("/")[0]), {}).get("secret")
            if secret is None or [item["path"] for item in secret["items"]] != [path.rpartition("/")[2]]:
                problems.append(f"{role}: the connector's secret is not in {path or 'a file'}")
                continue
            mounted.add(secret["secretName"])
    made = {o["metadata"]["name"] for o in kind(objects, "Secret") if o["metadata"]["labels"][COMPONENT] == "engine"}
    if len(mounted) > 1 or (made and made != mounted):
        problems.append(f"engines read {sorted(mounted)}, the chart makes {sorted(made)}")
    return problems


def router_args(objects):
    """Return complaints of the router's own parser."""
    args = container(templates(router(objects))[0])["args"]
    try:
        parsed = build_parser(args).parse_args(args)
        settings = serve_settings(parsed)
        check_open(settings)
    except SystemExit:
        return [f"the router's parser refuses {' '.join(args)}"]
    except ConfigError as exc:
        return [f"the router does not start: {exc}"]
    if settings.host == "127.0.0.1":
        return ["the router listens on localhost only"]
    ports = {port["name"]: port["containerPort"] for port in container(templates(router(objects))[0])["ports"]}
    own = {"http": settings.port} | ({} if settings.admin_port is None else {"admin": settings.admin_port})
    peers = settings.for_feature(PeerSettings)
    own |= {"peers": peers.peer_port} if peers.peers else {}
    return [] if own == ports else [f"the router listens on {own}, its container says {ports}"]


def engine_args(objects):
    """Return complaints about engines' arguments that need no vLLM: ports, roles, the connector's own settings."""
    problems = []
    for role, template in engine_pods(objects):
        c = container(template)
        args = c["args"]
        ports = {port["name"]: port["containerPort"] for port in c["ports"]}
        config = json.loads(flag(args, "--kv-transfer-config") or "{}")
        extra = config.get("kv_connector_extra_config", {})
        own = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}
        own = own[template["metadata"]["labels"]["pdrelay/role"]]
        if config.get("kv_role") not in ({"kv_both"} if extra.get("return_kv") else {own, "kv_both"}):
            problems.append(f"{role} has kv_role {config.get('kv_role')}")
        if config.get("kv_connector") != "PDRelayConnector":
            problems.append(f"{role} has the connector {config.get('kv_connector')}")
        try:
            read_settings(config["kv_connector_extra_config"], {})
        except Exception as exc:
            problems.append(f"{role}: {exc}")
        if flag(args, "--port") != str(ports["http"]) or template["metadata"]["annotations"]["pdrelay/port"] != str(
            ports["http"]
        ):
            problems.append(f"{role}: --port, port http and pdrelay/port differ")
    return problems


def engine_tls(objects):
    """Where engines serve https, whoever asks them does, trusts the same authorities and looks for the same name."""
    problems = []
    args = container(templates(router(objects))[0])["args"]
    wanted = flag(args, "--engine-server-name")
    trusted = _secret_of(templates(router(objects))[0], flag(args, "--engine-ca"))
    secure = {role: "--ssl-certfile" in container(one)["args"] for role, one in engine_pods(objects)}
    for role, template in engine_pods(objects):
        own = container(template)
        said = template["metadata"]["annotations"].get("pdrelay/scheme", "http")
        if said != ("https" if secure[role] else "http"):
            problems.append(f"{role}: pdrelay/scheme is {said}, which it does not serve")
        hook = own["lifecycle"]["preStop"]["exec"]["command"] if "lifecycle" in own else []
        asked = [own[probe] for probe in PROBES if probe in own]
        if not secure[role]:
            problems += [f"{role} is probed by https" for probe in asked if "scheme" in probe.get("httpGet", {})]
            continue
        commands = [hook, *(probe["exec"]["command"] for probe in asked if "exec" in probe)]
        problems += [
            f"{role} is probed by http" for p in asked if p.get("httpGet", {"scheme": "HTTPS"}).get("scheme") != "HTTPS"
        ]
        problems += [f"{role} is asked for another name by {c}" for c in commands if f"--server-name={wanted}" not in c]
        files = [flag(own["args"], "--ssl-certfile"), flag(own["args"], "--ssl-keyfile"), *_files(commands)]
        problems += [f"{role}: {file} is not mounted" for file in files if _secret_of(template, file) is None]
        if trusted is None or {_secret_of(template, file) for file in _files([hook]) if file.endswith("ca.crt")} != {
            trusted
        }:
            problems.append(f"{role} has another authority than the router's {trusted}")
        if "--ssl-cert-reqs" in own["args"]:
            shown = _secret_of(templates(router(objects))[0], flag(args, "--engine-cert"))
            problems += [] if shown else [f"{role} wants a certificate, and the router has none"]
            problems += [f"{role}: {c[1]} shows none" for c in commands if not any(w.startswith("--cert=") for w in c)]
            problems += [f"{role} wants a certificate of the kubelet" for probe in asked if "httpGet" in probe]
    for o in kind(objects, "PodMonitor"):
        ways = {end.get("scheme", "http") for end in o["spec"]["podMetricsEndpoints"]}
        if ways != {"https" if is_secure else "http" for is_secure in secure.values()}:
            problems.append(f"engines are scraped by {ways}")
    for o in kind(objects, "Pod"):
        (test,) = o["spec"]["containers"]
        if secure.get("decode") and f"--engine-server-name={wanted}" not in test["args"]:
            problems.append("the test asks decode engines for another name")
    return problems


def _files(commands):
    return [w.partition("=")[2] for c in commands for w in c if w.startswith(("--ca=", "--cert=", "--cert-key="))]


def _secret_of(template, path):
    """Return the name of the secret that a container's file comes from; None: it is not there."""
    folder, _, file = (path or "").rpartition("/")
    (name, *_) = [m["name"] for m in container(template)["volumeMounts"] if m["mountPath"] == folder] or [None]
    (volume, *_) = [one for one in template["spec"]["volumes"] if one["name"] == name] or [{}]
    parts = [part["secret"] for part in volume.get("projected", {}).get("sources", ())]
    whole = [{"name": volume["secret"]["secretName"], **volume["secret"]}] if "secret" in volume else []
    for one in (*parts, *whole):
        if any(item["path"] == file for item in one["items"]):
            return one["name"]
    return None


def side_channel(objects):
    """The side channel of a rank is on the IP of its pod, and every rank's port is declared there and its own."""
    problems = []
    for role, template in engine_pods(objects):
        args = container(template)["args"]
        ranks = int(flag(args, "--data-parallel-size") or 1)
        for number, pod in enumerate(templates(pool(objects, role))):
            here = range(0 if number else ranks)  # all are the leader's
            problems += [f"{role}-{number}: {said}" for said in _side_ports(pod, here)]
        said = template["metadata"]["annotations"].get("pdrelay/ranks", "1")
        if int(said) != ranks:
            problems.append(f"{role}: pdrelay/ranks is {said}, but there are {ranks}")
    shared = [role for role, template in engine_pods(objects) if template["spec"].get("hostNetwork")]
    if len(shared) == 2:
        sets = [{p["containerPort"] for p in container(template)["ports"]} for _, template in engine_pods(objects)]
        if sets[0] & sets[1]:
            problems.append(f"both roles want port {sets[0] & sets[1]} of the node")
    return problems


def _side_ports(template, ranks):
    variables = env(template)
    host = variables.get("VLLM_NIXL_SIDE_CHANNEL_HOST", {})
    if not ranks:  # its workers belong to the leader's rank
        if host.get("value") != "$(LWS_LEADER_ADDRESS)":
            yield "a worker looks for the side channel elsewhere than at its leader"
        return
    if host.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath") != "status.podIP":
        yield "the side channel is not on the pod's IP"
    ports = container(template).get("ports", ())
    first = int(variables["VLLM_NIXL_SIDE_CHANNEL_PORT"]["value"])
    declared = [p["containerPort"] for p in ports]
    if {p["name"]: p["containerPort"] for p in ports if p["name"].startswith("side-")} != {
        f"side-{rank}": first + rank for rank in ranks
    }:
        yield f"ports {declared} are declared, of ranks {list(ranks)} from {first} on"
    if len(set(declared)) < len(declared):
        yield f"two things have one port: {sorted(declared)}"


def drains(objects):
    """Grace is longer than everything that happens before the end, and what may be a prefill engine outlives leases."""
    problems = []
    template = templates(router(objects))[0]
    args, grace = container(template)["args"], template["spec"]["terminationGracePeriodSeconds"]
    hook = container(template).get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [""])
    asleep = re.search(r"sleep\((\d+)\)", hook[-1])
    needed = int(asleep[1] if asleep else 0) + sum(
        float(flag(args, f) or 0) for f in ("--drain-grace", "--shutdown-timeout")
    )
    if grace < needed + MARGIN_S:
        problems.append(f"router: grace is {grace} s, and it may take {needed:g} s")
    for role, template in engine_pods(objects):
        c = container(template)
        grace = template["spec"]["terminationGracePeriodSeconds"]
        command = c.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
        said = dict(arg.removeprefix("--").split("=") for arg in command if arg.startswith("--"))
        if said.get("role") != role or said.get("port") != flag(c["args"], "--port"):
            problems.append(f"{role}: its preStop hook looks elsewhere: {command}")
            continue
        lease = json.loads(flag(c["args"], "--kv-transfer-config"))["kv_connector_extra_config"].get(
            "kv_lease_duration", 30
        )
        needed = float(said["seconds"]) + float(flag(c["args"], "--shutdown-timeout"))
        if grace < needed + MARGIN_S:
            problems.append(f"{role}: grace is {grace} s, and it may take {needed:g} s")
        lends = role == "prefill" or flag(args, "--roles") == "auto"  # an engine may turn
        if lends and float(said["seconds"]) < math.ceil(lease) + float(said["settle"]):
            problems.append(f"{role}: it waits {said['seconds']} s for leases of {lease:g} s")
        if lends and grace < lease + MARGIN_S:
            problems.append(f"{role}: grace is {grace} s, shorter than its leases of {lease:g} s and {MARGIN_S} s")
    return problems

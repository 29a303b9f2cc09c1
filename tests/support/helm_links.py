"""Checks of names and of what points where: see helm_checks.py."""

import re

from support.helm_objects import COMPONENT, PROBES, WORKLOADS, ident, kind, matches, pods

NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # a Service's (RFC 1035); the others' may begin with a digit


def names(objects):
    """Names are legal, short enough for what is derived from them, and unique."""
    problems = []
    seen = set()
    for o in objects:
        name = o["metadata"]["name"]
        most = 52 if o["kind"] in WORKLOADS else 63  # controllers add a dash and ten characters
        if len(name) > most or not NAME.fullmatch(name):
            problems.append(f"{ident(o)}: the name is not one of at most {most} characters")
        if (o["kind"], name) in seen:
            problems.append(f"{ident(o)} is there twice")
        seen.add((o["kind"], name))
        problems += [
            f"{ident(o)}: label {key} is {value!r}"
            for key, value in o["metadata"]["labels"].items()
            if len(value) > 63 or not re.fullmatch(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?", value)
        ]
    return problems


def selectors(objects):
    """Every selector finds pods of one component, and does not change with a new version."""
    problems = []
    for o, selector in _selectors(objects):
        found = {meta["labels"][COMPONENT] for _, meta, _ in pods(objects) if matches(selector, meta["labels"])}
        if not found:
            problems.append(f"{ident(o)} selects no pod")
        elif o["kind"] != "PodMonitor" and len(found) > 1:
            problems.append(f"{ident(o)} selects pods of {', '.join(sorted(found))}")
        elif o["kind"] in WORKLOADS and found != {o["metadata"]["labels"][COMPONENT]}:
            problems.append(f"{ident(o)} selects pods of {found}")
        problems += [
            f"{ident(o)} selects by {key}, which changes"
            for key in selector.get("matchLabels", {})
            if any(word in key for word in ("version", "chart", "revision"))
        ]
    return problems


def _selectors(objects):
    """Yield everything that selects pods, and how. A ServiceMonitor selects services: references()."""
    for o in objects:
        spec = o.get("spec") or {}
        if o["kind"] == "Service":
            yield o, {"matchLabels": spec["selector"]}
        elif o["kind"] == "NetworkPolicy":
            yield o, spec["podSelector"]
            yield from (
                (o, p["podSelector"]) for p in _peers(spec) if "namespaceSelector" not in p and "podSelector" in p
            )
        elif "selector" in spec and o["kind"] != "ServiceMonitor":
            yield o, spec["selector"]
    for o, _, spec in pods(objects):
        yield from (({**o, "kind": "Place of"}, selector) for selector in _places(spec))


def _places(spec):
    for way in ("podAffinity", "podAntiAffinity"):
        wishes = spec.get("affinity", {}).get(way, {}).get("preferredDuringSchedulingIgnoredDuringExecution", ())
        yield from (wish["podAffinityTerm"]["labelSelector"] for wish in wishes)
    yield from (spread["labelSelector"] for spread in spec.get("topologySpreadConstraints", ()))


def _peers(spec):
    for rule in spec.get("ingress", ()):
        yield from rule.get("from", ())
    for rule in spec.get("egress", ()):
        yield from rule.get("to", ())


def references(objects):
    """Every name in an object is that of another one, or of something that the values name."""
    there = {(o["kind"], o["metadata"]["name"]) for o in objects}
    problems = [
        f"{ident(o)} names {kind} {name}, which is not there"
        for o, kind, name in _named(objects)
        if (kind, name) not in there
    ]
    for o, _, spec in pods(objects):
        problems += _mounts(o, spec)
    return problems + _ports(objects) + _scraped_services(objects)


def _named(objects):
    for o in objects:
        find = _NAMED.get(o["kind"])
        for kind_, name in find(o) if find else ():
            yield o, kind_, name
    for o, _, spec in pods(objects):
        yield o, "ServiceAccount", spec["serviceAccountName"]
        for volume in spec.get("volumes", ()):
            if "configMap" in volume:
                yield o, "ConfigMap", volume["configMap"]["name"]


def _scaled(o):
    return [(o["spec"]["scaleTargetRef"]["kind"], o["spec"]["scaleTargetRef"]["name"])]


def _bound(o):
    return [(one["kind"], one["name"]) for one in (o["roleRef"], *o["subjects"])]


def _behind_ingress(o):
    paths = [path for rule in o["spec"]["rules"] for path in rule["http"]["paths"]]
    return [("Service", path["backend"]["service"]["name"]) for path in paths]


def _behind_route(o):
    return [("Service", backend["name"]) for rule in o["spec"]["rules"] for backend in rule["backendRefs"]]


_NAMED = {
    "HorizontalPodAutoscaler": _scaled,
    "ScaledObject": _scaled,
    "RoleBinding": _bound,
    "Ingress": _behind_ingress,
    "HTTPRoute": _behind_route,
}


def _scraped_services(objects):
    problems = []
    for o in kind(objects, "ServiceMonitor"):
        services = [s for s in kind(objects, "Service") if matches(o["spec"]["selector"], s["metadata"]["labels"])]
        ports = {port["name"] for service in services for port in service["spec"]["ports"]}
        if len(services) != 1 or any(end["port"] not in ports for end in o["spec"]["endpoints"]):
            problems.append(f"{ident(o)} selects {len(services)} services with ports {sorted(ports)}")
    return problems


def _mounts(o, spec):
    volumes = {volume["name"] for volume in spec.get("volumes", ())}
    volumes |= {claim["metadata"]["name"] for claim in o["spec"].get("volumeClaimTemplates", ())}
    containers = (*spec.get("initContainers", ()), *spec["containers"])
    mounted = [mount["name"] for c in containers for mount in c.get("volumeMounts", ())]
    paths = [mount["mountPath"] for c in spec["containers"] for mount in c.get("volumeMounts", ())]
    problems = [f"{ident(o)} mounts {name}, which is no volume" for name in mounted if name not in volumes]
    problems += [f"{ident(o)} has a volume {name} that is not mounted" for name in volumes - set(mounted)]
    return problems + ([f"{ident(o)} mounts twice at one path"] if len(set(paths)) < len(paths) else [])


def _ports(objects):
    """Ports that are named exist in every pod, or group of pods, that they are looked for in."""
    problems = []
    for o in kind(objects, "Service", "NetworkPolicy", "PodMonitor"):
        spec = o["spec"]
        if o["kind"] == "Service":
            selector = {"matchLabels": spec["selector"]}
            wanted = [port["targetPort"] for port in spec["ports"]]
        elif o["kind"] == "NetworkPolicy":
            selector = spec["podSelector"]
            wanted = [port["port"] for rule in spec["ingress"] for port in rule.get("ports", ())]
        else:
            selector = spec["selector"]
            wanted = [end["port"] for end in spec["podMetricsEndpoints"]]
        there = {}  # of a group, what any of its pods has
        for owner, meta, pod in pods(objects):
            if matches(selector, meta["labels"]):
                ports = {port["name"] for c in pod["containers"] for port in c.get("ports", ())}
                there.setdefault(ident(owner), set()).update(ports)
        problems += [
            f"{ident(o)} wants port {name}, {owner} has none"
            for owner, ports in there.items()
            for name in wanted
            if name not in ports
        ]
    for owner, _, pod in pods(objects):
        for c in pod["containers"]:
            probed = [c[p][way]["port"] for p in PROBES if p in c for way in ("httpGet", "tcpSocket") if way in c[p]]
            there = {port["name"] for port in c.get("ports", ())}
            problems += [f"{ident(owner)} probes port {name}, which it has not" for name in probed if name not in there]
    return problems

"""Checks of what pods may ask for, and who may reach them: see helm_checks.py."""

from support.helm_objects import (
    COMPONENT,
    WORKER_INDEX,
    container,
    engine_pods,
    flag,
    ident,
    kind,
    pools,
    router,
    templates,
)

# What a router asks of the Kubernetes API: the chart's Role must allow this, and nothing more.
PODS = {("", "pods", verb) for verb in ("list", "watch")}
LEASE = {("coordination.k8s.io", "leases", verb) for verb in ("get", "patch")}
STORE = {("", "configmaps", verb) for verb in ("list", "watch", "patch")}


def rbac(objects):
    """The Role is what the router asks for, in its own namespace; nobody has a ClusterRole."""
    problems = [f"{ident(o)} reaches beyond the namespace" for o in kind(objects, "ClusterRole", "ClusterRoleBinding")]
    args = container(templates(router(objects))[0])["args"]
    store = flag(args, "--store") or ""
    wanted = (PODS if "--kubernetes-selector" in args else set()) | (
        STORE if store.startswith("kubernetes:") else set()
    )
    if flag(args, "--roles") == "auto" and store.startswith("kubernetes:"):
        wanted |= LEASE
    given = {
        (group, resource, verb)
        for role in kind(objects, "Role")
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    problems += [f"the Role lacks {verb} of {resource}" for _, resource, verb in sorted(wanted - given)]
    problems += [
        f"the Role allows {verb} of {resource}, which nobody asks for" for _, resource, verb in sorted(given - wanted)
    ]
    for role in kind(objects, "Role"):
        for rule in role["rules"]:
            if "configmaps" in rule["resources"] and rule.get("resourceNames") != [store.removeprefix("kubernetes:")]:
                problems.append(f"the Role is for ConfigMaps {rule.get('resourceNames')}, the store is {store}")
    if store.startswith("kubernetes:") and not any(
        o["metadata"]["name"] == store.removeprefix("kubernetes:") and "data" not in o
        for o in kind(objects, "ConfigMap")
    ):
        problems.append(f"there is no empty ConfigMap for the store {store}")
    return problems


def discovery(objects):
    """The router looks for a label that both pools have; pods of both have one revision; a worker is none."""
    problems = []
    args = container(templates(router(objects))[0])["args"]
    key, _, value = (flag(args, "--kubernetes-selector") or "").partition("=")
    revisions = set()
    for role, template in engine_pods(objects):
        labels = template["metadata"]["labels"]
        if key and labels.get(key) != value:
            problems.append(f"{role} pods are not found by {key}={value}")
        if labels.get("pdrelay/role") not in ({role} if len(pools(objects)) > 1 else {"both"}):
            problems.append(f"{role} pods say they are {labels.get('pdrelay/role')}")
        revisions.add(labels.get("pdrelay/revision"))
        if WORKER_INDEX in labels:
            problems.append(f"{role} pods claim a worker index")
    if len(revisions) != 1 or None in revisions:
        problems.append(f"pods have revisions {sorted(map(str, revisions))}")
    return problems


def isolation(objects):
    """Engines are open to engines and, for HTTP, to routers and named peers; to nobody else."""
    problems = []
    policies = {o["metadata"]["labels"][COMPONENT]: o for o in kind(objects, "NetworkPolicy")}
    for role in pools(objects):
        if role not in policies:
            problems.append(f"{role} has no NetworkPolicy")
            continue
        for rule in policies[role]["spec"]["ingress"]:
            peers = {
                p["podSelector"]["matchLabels"][COMPONENT] for p in rule.get("from", ()) if "namespaceSelector" not in p
            }
            if not rule.get("from"):
                problems.append(f"{role}: a rule is open to everybody")
            elif "ports" not in rule and peers != set(pools(objects)):
                problems.append(f"{role}: all ports are open to {peers}")
            elif "ports" in rule and [port["port"] for port in rule["ports"]] != ["http"]:
                events = all(str(port["port"]).startswith("kv-events-") for port in rule["ports"])
                if not events or peers:
                    problems.append(f"{role}: {rule['ports']} is open to {peers or rule['from']}")
    return problems


def admin_port(objects):
    """What operators use is at a port of its own, open to named peers and shown by no load balancer."""
    problems = []
    for o in kind(objects, "NetworkPolicy"):
        for rule in o["spec"]["ingress"] if o["metadata"]["labels"][COMPONENT] == "router" else ():
            ports = [port["port"] for port in rule.get("ports", ())]
            if ports not in (["http"], ["admin"], ["peers"]):
                problems.append(f"router: a rule is for the ports {ports}")
            if ports != ["http"] and not rule.get("from"):
                problems.append(f"router: {ports} is open to everybody")
    for o in kind(objects, "Service"):
        ports = [port["targetPort"] for port in o["spec"]["ports"]]
        is_own = o["metadata"]["labels"][COMPONENT] == "router-admin"
        if ("admin" in ports) is not is_own or (is_own and (len(ports) > 1 or o["spec"]["type"] != "ClusterIP")):
            problems.append(f"{ident(o)}, of type {o['spec'].get('type')}, has the ports {ports}")
    return problems

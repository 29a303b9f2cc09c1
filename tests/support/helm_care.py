"""More checks, as those of helm_checks.py: what a pod takes of its node's disk, and who waits for whom, and may ask."""

from support.helm_checks import CHECKS
from support.helm_objects import COMPONENT, WORKLOADS, container, ident, kind, matches, pods, templates

GIB = {"Ki": 2**-20, "Mi": 2**-10, "Gi": 1, "Ti": 2**10}


def gib(quantity):
    return float(quantity[:-2]) * GIB[quantity[-2:]]


def disk(objects):
    """What goes to the node's disk is bounded and asked for: else the kubelet evicts whoever comes first."""
    problems = []
    for o, _, spec in pods(objects):
        (c,) = spec["containers"]
        volumes = [v for v in spec.get("volumes", ()) if "emptyDir" in v and "medium" not in v["emptyDir"]]
        problems += [f"{ident(o)}: {v['name']} has no limit" for v in volumes if "sizeLimit" not in v["emptyDir"]]
        if "ephemeral-storage" not in c["resources"].get("requests", {}):
            problems.append(f"{ident(o)} asks for no ephemeral-storage")
        if most := c["resources"].get("limits", {}).get("ephemeral-storage"):
            inside = sum(gib(v["emptyDir"].get("sizeLimit", "0Gi")) for v in volumes)
            if inside >= gib(most):
                problems.append(f"{ident(o)} is evicted at {most}, before its volumes of {inside:g} GiB are full")
    return problems


def workers(objects):
    """SIGTERM to a worker ends the engine: it comes when the leader has nothing left, by the same hook and grace."""
    problems = []
    for o in kind(objects, *WORKLOADS):
        leader, *others = templates(o)
        for worker in others:
            hooks = [
                container(one).get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
                for one in (leader, worker)
            ]
            if hooks[1] != [*hooks[0], "--of-leader"]:
                problems.append(f"{ident(o)}: a worker does not wait for its leader: {hooks[1]}")
            if leader["spec"]["terminationGracePeriodSeconds"] != worker["spec"]["terminationGracePeriodSeconds"]:
                problems.append(f"{ident(o)}: leader and worker have unequal time")
    return problems


def tested(objects):
    """The test's pod gets to routers and to the metrics of decode engines, and has the files that its flags name."""
    problems = []
    for o in kind(objects, "Pod"):
        labels = o["metadata"]["labels"]
        c = container(o)
        for role in ("router", "decode"):
            for policy in kind(objects, "NetworkPolicy"):
                rules = [r for r in policy["spec"]["ingress"] if r.get("ports") == [{"port": "http"}]]
                peers = [peer["podSelector"] for r in rules for peer in r.get("from", ()) if "podSelector" in peer]
                is_open = any("from" not in r for r in rules) or any(matches(peer, labels) for peer in peers)
                if policy["metadata"]["labels"][COMPONENT] == role and not is_open:
                    problems.append(f"{ident(o)} does not get to the {role} pods")
        paths = [arg.partition("=")[2] for arg in c["args"][1:] if arg.partition("=")[2].startswith("/etc/")]
        folders = [mount["mountPath"] for mount in c.get("volumeMounts", ())]
        problems += [f"{ident(o)}: {p} is not mounted" for p in paths if p.rpartition("/")[0] not in folders]
    return problems


ALL = CHECKS | {check.__name__: check for check in (disk, workers, tested)}


def all_complaints(objects):
    """Return what all checks say."""
    return [f"{name}: {problem}" for name, check in ALL.items() for problem in check(objects)]

"""Finding one's way in rendered objects."""

WORKLOADS = ("Deployment", "LeaderWorkerSet")
COMPONENT = "app.kubernetes.io/component"
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"


def kind(objects, *kinds):
    return [one for one in objects if one["kind"] in kinds]


def one(objects, kind, name):
    (found,) = [o for o in objects if o["kind"] == kind and o["metadata"]["name"] == name]
    return found


def component(objects, name, *kinds):
    (found,) = [o for o in kind(objects, *kinds) if o["metadata"]["labels"][COMPONENT] == name]
    return found


def router(objects):
    return component(objects, "router", "Deployment")


def pool(objects, role):
    return component(objects, role, *WORKLOADS)


def templates(workload):
    """Return the pod templates of a workload; of a LeaderWorkerSet first the leader's, then the worker's."""
    spec = workload["spec"]
    if workload["kind"] == "LeaderWorkerSet":
        return [spec["leaderWorkerTemplate"]["leaderTemplate"], spec["leaderWorkerTemplate"]["workerTemplate"]]
    return [spec["template"]]


def pods(objects):
    """Return all pods as (what they belong to, metadata, spec)."""
    found = [(o, t["metadata"], t["spec"]) for o in kind(objects, *WORKLOADS) for t in templates(o)]
    return found + [(o, o["metadata"], o["spec"]) for o in kind(objects, "Pod")]


def pools(objects):
    """Return the names of the pools: those of one role each, or the only one, whose pods serve both."""
    labels = [template["metadata"]["labels"] for o in kind(objects, *WORKLOADS) for template in templates(o)]
    is_one = any(one.get("pdrelay/role") == "both" for one in labels)
    return ["decode"] if is_one else ["prefill", "decode"]


def engine_pods(objects):
    """Return (pool, template) for every pod of an engine that answers requests."""
    return [(role, templates(pool(objects, role))[0]) for role in pools(objects)]


def container(template):
    (found,) = template["spec"]["containers"]
    return found


def flag(args, name):
    """Return what stands behind a flag; None: it is not there."""
    return args[args.index(name) + 1] if name in args else None


def env(template):
    return {entry["name"]: entry for entry in container(template).get("env", ())}


def matches(selector, labels):
    """Tell whether labels satisfy matchLabels and matchExpressions."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for rule in selector.get("matchExpressions", ()):
        present = rule["key"] in labels
        value = labels.get(rule["key"])
        verdict = {
            "Exists": present,
            "DoesNotExist": not present,
            "In": value in rule.get("values", ()),
            "NotIn": value not in rule.get("values", ()),
        }[rule["operator"]]
        if not verdict:
            return False
    return True


def ident(o):
    return f"{o['kind']} {o['metadata']['name']}"


def as_controller(objects):
    """Put a LeaderWorkerSet in place of each role, as the controller does; see :func:`of_controller`."""
    (whole,) = kind(objects, "DisaggregatedSet")
    return [o for o in objects if o is not whole] + of_controller(whole)


def of_controller(whole):
    """Return the LeaderWorkerSets of a DisaggregatedSet, of its last slice if it has several, with the longest names.

    LWS newer than 0.9 has the slice's number in each name; the hash there changes.
    """
    name = f"{whole['metadata']['name']}-{whole['spec'].get('slices', 1) - 1}-01234567"
    api = "leaderworkerset.x-k8s.io/v1"
    return [
        {
            "apiVersion": api,
            "kind": "LeaderWorkerSet",
            "metadata": {**role["metadata"], "name": f"{name}-{role['name']}", "namespace": "ns"},
            "spec": role["spec"],
        }
        for role in whole["spec"]["roles"]
    ]

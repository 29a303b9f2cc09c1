"""What a router asks of the Kubernetes API: the Role of the chart must allow this, and nothing more.

``tests/helm/test_rbac.py`` compares it with the chart, and with the calls that a fake API recorded of a real router.
"""

PODS = {("", "pods", verb) for verb in ("list", "watch")}
LEASE = {("coordination.k8s.io", "leases", verb) for verb in ("get", "patch")}
STORE = {("", "configmaps", verb) for verb in ("list", "watch", "patch")}

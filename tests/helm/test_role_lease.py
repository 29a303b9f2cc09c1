"""The lease of the router that decides on roles."""

import pytest

from support.helm_chart import HELMS, Chart
from support.helm_objects import kind

pytestmark = pytest.mark.processes


AUTO = {
    "connector": {"kvBoth": True},
    "router": {"settings": {"roles": "auto", "target_ttft_s": 2, "target_itl_s": 0.05}},
}


@pytest.mark.parametrize("helm", HELMS)
def test_routers_may_read_and_change_their_own_lease_and_no_other(helm):
    """It has the name of the store's ConfigMap, by which the router finds it."""
    objects = Chart().objects(AUTO, helm=helm)
    (lease,), (config,) = kind(objects, "Lease"), [o for o in kind(objects, "ConfigMap") if "data" not in o]
    rules = [rule for role in kind(objects, "Role") for rule in role["rules"] if "leases" in rule["resources"]]

    assert lease["apiVersion"] == "coordination.k8s.io/v1"
    assert lease["metadata"]["name"] == config["metadata"]["name"]
    assert "spec" not in lease
    assert rules == [
        {
            "apiGroups": ["coordination.k8s.io"],
            "resources": ["leases"],
            "resourceNames": [lease["metadata"]["name"]],
            "verbs": ["get", "patch"],
        }
    ]


@pytest.mark.parametrize(
    "values", [{}, {"router": {"settings": AUTO["router"]["settings"] | {"roles": "dry-run"}}}], ids=["off", "dry-run"]
)
def test_without_a_controller_there_is_none(values):
    """Rights that are not used are rights that are misused."""
    objects = Chart().objects(values)

    assert kind(objects, "Lease") == []
    assert "leases" not in str(kind(objects, "Role"))

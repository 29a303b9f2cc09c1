"""What an operator has to know of a setting stands beside it: which gateways take a route, and who counts a limit."""

import copy
import json
import re

import pytest
import yaml
from jsonschema import Draft202012Validator

from support.helm_chart import ROOT, Chart
from support.helm_objects import kind
from support.helm_schemas import CRDS

pytestmark = pytest.mark.processes


LIMITS = ["max_concurrency", "max_rate", "max_key_rate", "max_key_tokens_per_minute"]
GATEWAY = {"httpRoute": {"enabled": True, "parentRefs": [{"name": "g"}]}, "router": {"allowUnauthenticated": True}}


def comment_of(key):
    """Return what values.yaml says above a key of the router."""
    lines = (ROOT / "helm/pdrelay/values.yaml").read_text().splitlines()
    at = next(n for n in range(lines.index("router:"), len(lines)) if lines[n].startswith(f"  {key}:"))
    said = []
    while lines[at - 1].strip().startswith("#"):
        at -= 1
        said.insert(0, lines[at].strip())
    return " ".join(said)


def row_of(page, key):
    return next(line for line in (ROOT / page).read_text().splitlines() if line.startswith(f"| `{key}`"))


def older(schema):
    """Return the schema of an HTTPRoute before 1.2, whose standard channel has no timeouts of rules."""
    found = copy.deepcopy(schema)
    del found["properties"]["spec"]["properties"]["rules"]["items"]["properties"]["timeouts"]
    return found


@pytest.mark.parametrize("helm", ["helm3", "helm4"])
def test_a_route_without_a_timeout_of_its_own_is_one_for_older_gateways_too(helm):
    """The field is new in Gateway API 1.2: an API server with older CRDs refuses the whole object, strictly read."""
    new = json.loads((CRDS / "httproute.json").read_text())
    asked = Chart().objects(GATEWAY | {"httpRoute": GATEWAY["httpRoute"] | {"requestTimeout": "600s"}}, helm=helm)
    silent = Chart().objects(GATEWAY, helm=helm)

    found = {
        (age, name): [error.message for error in Draft202012Validator(schema).iter_errors(*kind(objects, "HTTPRoute"))]
        for age, schema in (("1.2", new), ("1.1", older(new)))
        for name, objects in (("asked", asked), ("silent", silent))
    }
    assert found.pop(("1.1", "asked")) == ["Additional properties are not allowed ('timeouts' was unexpected)"]
    assert set(map(tuple, found.values())) == {()}


def test_who_sets_that_timeout_reads_which_gateways_take_it():
    """Beside the value, in the chart's table and in the guide."""
    said = yaml.safe_load((ROOT / "helm/pdrelay/values.yaml").read_text())["httpRoute"]
    pages = [row_of("helm/pdrelay/README.md", "httpRoute.requestTimeout"), (ROOT / "docs/kubernetes.md").read_text()]

    assert said["requestTimeout"] == ""
    for page in pages:
        assert re.search(r"requestTimeout`.*Gateway API 1\.2 or newer", page)


@pytest.mark.parametrize("limit", LIMITS)
def test_who_sets_a_limit_reads_that_each_router_counts_by_itself(limit):
    """An HPA of the routers multiplies a customer's quota, and no object of the chart shows it."""
    for said in (comment_of("settings"), row_of("helm/pdrelay/README.md", "router.settings")):
        assert f"`{limit}`" in said
        assert "in each router by itself" in said
    operations = (ROOT / "docs/kubernetes-operations.md").read_text().split("\n## Limits\n")[1].split("\n## ")[0]
    assert f"`{limit}`" in operations
    assert "in each router by itself" in " ".join(operations.split())
    assert "`router.autoscaling.max`" in operations
    admission = (ROOT / "docs/routing.md").read_text().split("\n## Admission\n")[1]
    assert f"`{limit}`" in admission
    assert "Each router counts by itself" in admission

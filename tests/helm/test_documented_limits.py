"""What an operator has to know of a setting stands beside it: which gateways take a route, and who counts a limit."""

import copy
import json

import pytest

from support.helm_chart import Chart
from support.helm_objects import kind
from support.helm_schemas import CRDS
from support.json_schemas import Draft202012Validator

pytestmark = pytest.mark.processes


GATEWAY = {"httpRoute": {"enabled": True, "parentRefs": [{"name": "g"}]}, "router": {"allowUnauthenticated": True}}


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

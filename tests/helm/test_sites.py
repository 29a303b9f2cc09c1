"""Values of made-up sites (sites.yaml): both helms render them, and Kubernetes 1.29 to 1.37 takes the objects."""

from pathlib import Path

import pytest
import yaml

from support.helm_care import all_complaints
from support.helm_chart import Chart
from support.helm_objects import as_controller, ident, kind
from support.helm_schemas import EACH_VERSION, VERSIONS, wrong

pytestmark = pytest.mark.processes


SITES = yaml.safe_load((Path(__file__).parent / "sites.yaml").read_text())


@pytest.fixture(scope="module")
def rendered():
    """Each site once by each helm."""
    found = {}

    def render(site, helm):
        if (site, helm) not in found:
            found[site, helm] = Chart().objects(SITES[site]["values"], helm=helm)
        return found[site, helm]

    return render


def minor(version):
    return int(version.split(".")[1])


@pytest.mark.parametrize("site", SITES)
@pytest.mark.slow  # the other helm renders all of it again
def test_a_site_is_the_same_to_both_helms(site, rendered):
    assert rendered(site, "helm3") == rendered(site, "helm4")


@pytest.mark.parametrize("site", SITES)
def test_a_site_keeps_the_rules(site, rendered):
    """The checks are those of the files of ci/."""
    objects = rendered(site, "helm4")

    assert len({ident(o) for o in objects}) == len(objects) > 3
    whole = as_controller(objects) if kind(objects, "DisaggregatedSet") else objects
    # A router alone has no pools, which most checks look for: test_discovery.py has those that apply to it.
    assert SITES[site]["values"].get("decode", {}).get("enabled") is False or all_complaints(whole) == []


@pytest.mark.parametrize("version", EACH_VERSION)
@pytest.mark.parametrize("site", SITES)
def test_a_site_is_what_each_kubernetes_expects(site, version, rendered):
    """Strictly; a site with a newer feature is refused by the schemas of those before it, so `since` is right."""
    problems = [problem for o in rendered(site, "helm4") for problem in wrong(o, version)]

    assert (problems == []) is (minor(version) >= minor(SITES[site].get("since", VERSIONS[0]))), problems

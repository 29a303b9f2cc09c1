"""Policies of other packages."""

import sys

import pytest

from pdrelay_proxy.app import build
from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.push_coordinates import PushCoordinates
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import Role, RoutingHints
from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.io.request_path.policies import fleet_of
from pdrelay_proxy.io.routing_plugins import GROUP, installed_policies
from pdrelay_proxy.known_settings import OPTIONS
from pdrelay_proxy.setting_values import read
from pdrelay_proxy.settings import PolicyName, Settings
from pdrelay_tools.planning.replay.simulation import SimulatedFleet, replay
from pdrelay_tools.planning.replay.traces import Conversations

SOURCE = '''
class LastOne:
    """The last engine of the list."""
    def __init__(self, parts): self.parts = parts
    def choose(self, among, hints=None): return among[-1]
    def copy(self): return self
class Roomy:
    """Avoids engines whose KV caches are nearly full."""
    def __init__(self, parts): self.parts = parts
    def choose(self, among, hints=None):
        return ([each for each in among if (self.parts.kv_usage(each) or 0.0) < 0.8] or among)[0]
    def copy(self): return self
class Nothing:
    def __init__(self, parts): pass
def broken(parts): raise RuntimeError("no licence")
'''
NAMES = "last = {m}:LastOne\nround_robin = {m}:LastOne\nnothing = {m}:Nothing\nroomy = {m}:Roomy\n"
NAMES += "broken = {m}:broken\ngone = {m}_gone:X\n"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Install a distribution with policies, for one test."""
    (tmp_path / "their_policies.py").write_text(SOURCE)
    info = tmp_path / "their_policies-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-policies\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n" + NAMES.format(m="their_policies"))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("their_policies", None)


@pytest.mark.usefixtures("installed")
def test_a_policy_of_an_installed_package_is_chosen_by_its_name():
    """And takes no name of the router's own."""
    kind = OPTIONS["prefill_policy"].kind
    found = replay(Conversations(5, 2, 4.0, 2.0, 320, 200, 60).generate(16, 0), "last", SimulatedFleet(3, 3), seed=0)

    assert installed_policies() == ["broken", "gone", "last", "nothing", "roomy"]
    assert read(kind, "last") == "last"
    assert read(kind, "prefix") == PolicyName.PREFIX
    assert [log.busy_s > 0 for _, log in found.engines] == [False, False, True] * 2


@pytest.mark.usefixtures("installed")
def test_a_policy_sees_which_share_of_its_kv_cache_an_engine_uses():
    """As it showed last; what is old says nothing any more."""
    now = 0.0
    settings = Settings(decode_policy="roomy")
    registry = Registry()
    registry.add(Role.PREFILL, Address("http", "p", 1))
    full, free = (registry.add(Role.DECODE, Address("http", "d", port)) for port in (1, 2))
    fleet = fleet_of(settings, registry, PushCoordinates(at_once=True), lambda: now, lambda _: 0)

    assert fleet.any_pair(RoutingHints())[1] == full
    registry.member(full.id).load.kv_shown(0.9, now=now)
    registry.member(free.id).load.kv_shown(0.1, now=now)
    assert fleet.any_pair(RoutingHints())[1] == free
    now = 61.0
    assert fleet.any_pair(RoutingHints())[1] == full


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing", "no method choose and no method copy"),
        ("broken", r"cannot be loaded: RuntimeError\('no licence'\)"),
        ("gone", "cannot be loaded: ModuleNotFoundError"),
        ("other", "there are round_robin, .*, expected_ttft, broken, gone, last, nothing, roomy"),
    ],
)
def test_one_that_is_no_policy_is_an_error_at_start(name, said):
    """With the package's own words, and not when the first request comes."""
    with pytest.raises(ConfigError, match=said):
        build(Settings(prefill=("p:1",), decode=("d:1",), decode_policy=name))


def test_expected_ttft_stands_for_both_legs():
    """It is one cost for a pair."""
    with pytest.raises(ConfigError, match="write it as prefill_policy and as decode_policy"):
        build(Settings(prefill=("p:1",), decode=("d:1",), decode_policy="expected_ttft"))

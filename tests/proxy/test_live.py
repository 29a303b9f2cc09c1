"""What changes while the router serves."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pdrelay_proxy.app import build
from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.admission import admission
from pdrelay_proxy.core.model import EngineRole, InstanceId, RequestId, Role
from pdrelay_proxy.core.routing import route
from pdrelay_proxy.errors import AddressError, ConfigError
from pdrelay_proxy.known_settings import OPTIONS, SECRETS
from pdrelay_proxy.requests import (
    attempt,
    attempt_legs,
    client_response,
    dispatch,
    gate,
    leg_sending,
    request,
    request_set,
    terms,
)
from pdrelay_proxy.settings import Settings

OLD = Settings(prefill=("p0:1", "p1:1"), decode=("d0:1",))


def known(router):
    return [i.address.authority for role in Role for i in router.live.registry.known(role)]


def usable(router):
    return [i.address.authority for role in Role for i in router.live.registry.usable(role)]


def test_engines_come_and_go_and_those_added_by_hand_stay():
    """The settings speak only of their own."""
    router = build(OLD)
    router.live.registry.add(Role.DECODE, Address.parse("hand:1"), now=0.0)
    router.live.prepared(OLD, replace(OLD, prefill=("p1:1", "p2:1"), decode=("hand:1",)))()

    assert usable(router) == ["p1:1", "p2:1", "hand:1"]


def test_an_engine_that_is_no_longer_listed_finishes_what_it_has():
    """It can be seen until then, and is forgotten after that."""
    router = build(OLD)
    (engine,) = router.live.registry.known(Role.DECODE)
    router.live.registry.member(engine.id).load.enter(RequestId("r"))
    router.live.prepared(OLD, replace(OLD, decode=("d1:1",)))()
    router.live.registry.settle(patience_s=60, now=1e9)
    assert [known(router), usable(router)] == [["p0:1", "p1:1", "d0:1", "d1:1"], ["p0:1", "p1:1", "d1:1"]]
    router.live.registry.member(engine.id).load.leave(RequestId("r"))
    router.live.registry.settle(patience_s=60, now=1e9)

    assert known(router) == ["p0:1", "p1:1", "d1:1"]


@pytest.mark.parametrize(
    ("name", "to", "gone"),
    [
        ("decode-1", EngineRole.PREFILL, {"decode": ("d0:1",)}),
        ("prefill-1", EngineRole.DECODE, {"prefill": ("p0:1",)}),
        ("decode-1", EngineRole.BOTH, {"decode": ("d0:1",)}),
        ("prefill-1", EngineRole.BOTH, {"prefill": ("p0:1",)}),
    ],
)
def test_an_engine_that_has_turned_goes_with_its_line_of_the_settings(name, to, gone):
    """They name the role with which it was added."""
    settings = replace(OLD, decode=("d0:1", "d1:1"))
    router = build(settings)
    router.live.registry.departures.change_role(InstanceId(name), to, now=0.0, at_once=True)
    assert router.live.registry.member(InstanceId(name)).role is to
    router.live.prepared(settings, replace(settings, **gone))()

    assert [member.instance.id for member in router.live.registry.members() if member.retires] == [name]


def test_an_engine_that_has_turned_stays_if_its_address_leaves_the_other_list():
    """There was another engine of that line."""
    old = replace(OLD, decode=("d0:1", "d1:1"))
    router = build(old)
    router.live.registry.departures.change_role(InstanceId("decode-1"), EngineRole.PREFILL, now=0.0, at_once=True)
    before = replace(old, prefill=("p0:1", "p1:1", "d1:1"))
    router.live.prepared(before, old)()

    assert not any(member.retires for member in router.live.registry.members())


def test_an_engine_that_is_listed_otherwise_is_another_one():
    """For example with two data-parallel ranks."""
    router = build(OLD)
    router.live.prepared(OLD, replace(OLD, decode=("d0:1#dp=2",)))()

    assert [i.rank for i in router.live.registry.usable(Role.DECODE)] == [0, 1]


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"prefill": ("nowhere",)}, AddressError),
        ({"decode": ("a:1", "http://A:1")}, ConfigError),
        ({"max_inflight_bytes": 1}, ConfigError),
        ({"max_key_rate": 1.0}, ConfigError),
        ({"api_keys_file": "/nowhere"}, ConfigError),
        ({"prefill_api_key": "two words"}, ConfigError),
    ],
)
def test_all_of_it_or_nothing(wrong, error):
    """A half-changed router is one nobody has tested."""
    router = build(OLD)
    with pytest.raises(error):
        router.live.prepared(OLD, replace(OLD, max_queue=7, **({"decode": ("d1:1",)} | wrong)))()

    assert known(router) == ["p0:1", "p1:1", "d0:1"]
    assert router.live.gate.admission.limits.max_queue == OLD.max_queue


def test_limits_and_rules_are_the_new_ones():
    """For requests that come from now on."""
    router = build(OLD)
    router.live.prepared(OLD, replace(OLD, max_queue=7, retries=5))()

    assert router.live.gate.admission.limits.max_queue == 7
    assert router.live.settings.current.retries == 5


FILES = {"api_keys_file": "a:first-0123456789ab\n"} | dict.fromkeys(
    ("admin_key_file", "join_key_file", "prefill_api_key_file", "decode_api_key_file"), "first-0123456789ab\n"
)
KEYS = [b"first-0123456789ab", b"second-0123456789ab", b"second-0123456789"]


@pytest.fixture
def keyed(tmp_path):
    """Return settings with a file for each kind of key; that of joining engines has another key than operators'."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text if name != "join_key_file" else f"join-{text}")
    return replace(OLD, **{name: str(tmp_path / name) for name in FILES})


def good(live, name):
    """Return which of the keys is good, or shown to engines."""
    match name:
        case "api_keys_file":
            return [live.keyring.keys.owner(key) is not None for key in KEYS]
        case "admin_key_file":
            return [live.admin_key.matches(key) for key in KEYS]
        case "join_key_file":
            return [live.join_key.matches(b"join-" + key) for key in KEYS]
        case _:
            role = Role.PREFILL if name.startswith("prefill") else Role.DECODE
            shown = live.outbound.headers(role, ())
            return [shown == ((b"authorization", b"Bearer " + key),) for key in KEYS]


@pytest.mark.parametrize("name", FILES)
def test_a_key_that_is_half_written_when_the_router_is_told_to_reload_counts_for_nothing(keyed, name, caplog):
    """The old one stays until the file's last line ends; the log shows none. Another file counts as it is."""
    live = build(keyed).live
    path = Path(getattr(keyed, name))
    second = path.read_text().replace("first", "second")
    found = []
    for text in (second[:-3], second):
        path.write_text(text)
        live.prepared(keyed, keyed)()
        found.append(good(live, name))
    other = path.with_name("other")
    other.write_text(second[:-3])
    live.prepared(keyed, replace(keyed, **{name: str(other)}))()

    assert [*found, good(live, name)] == [[True, False, False], [False, True, False], [False, False, True]]
    assert f"{name} has no line break at its end, or is being written" in caplog.text
    assert "0123" not in caplog.text


@pytest.mark.parametrize("name", FILES)
def test_a_key_file_that_never_had_a_line_break_is_no_news(keyed, name, caplog):
    """Secrets that Kubernetes mounts have none, and they are what was read at the start."""
    path = Path(getattr(keyed, name))
    path.write_text(path.read_text().rstrip())
    live = build(keyed).live
    live.prepared(keyed, keyed)()

    assert good(live, name) == [True, False, False]
    assert "or is being written" not in caplog.text


class Read:
    """Settings that remember which of them somebody has looked at."""

    def __init__(self, settings):
        self._settings, self.names = settings, set()

    def __getattr__(self, name):
        self.names.add(name)
        return getattr(self._settings, name)


def test_what_is_declared_to_take_effect_is_what_a_reload_reads():
    """docs/options.md says it to operators; server.py reads the log's level and the times of its end by itself."""
    new = Read(OLD)
    build(OLD).live.prepared(OLD, new)()
    live = {name for name, setting in OPTIONS.items() if setting.option.live and setting.owner is Settings}
    # Requests and their gate get all settings, and read them when a request is admitted.
    modules = (
        *(
            admission,
            attempt,
            attempt_legs,
            client_response,
            dispatch,
            gate,
            leg_sending,
            request,
            request_set,
            route,
            terms,
        ),
    )
    files = [Path(module.__file__) for module in modules]
    sources = "".join(file.with_name(file.name.partition(".")[0] + ".py").read_text() for file in files)
    new.names.update(live & set(re.findall(r"(?:limits|settings(?:\.current)?)\.(\w+)", sources)))
    at_its_end = {"log_level", "drain_grace_s", "shutdown_timeout_s"}
    looked_at = {
        "host",
        "prefill_policy",
        "decode_policy",
        "allow_unauthenticated",
        "allowed_origins",
        "tls_client_ca",
        "max_body_bytes",
        "for_feature",  # the settings of features
        *("workers", "admin_port", "admin_host"),
        *SECRETS,
    }  # to refuse what is wrong

    assert live - new.names == at_its_end
    assert new.names - live <= looked_at


LIVE_OF_FEATURES = [name for name, setting in OPTIONS.items() if setting.option.live and setting.owner is not Settings]


@pytest.mark.parametrize("name", LIVE_OF_FEATURES)
def test_a_feature_s_setting_that_takes_effect_is_read_from_the_present_settings(name):
    """From those that a request has, not from those that the router was built with."""
    folder = Path(sys.modules[OPTIONS[name].owner.__module__].__file__).parent
    sources = [file.read_text() for file in folder.rglob("*.py") if file.name != "settings.py"]
    readers = [text for text in sources if re.search(rf"\b{name}\b", text)]

    assert readers
    assert not [text for text in readers if "ground.settings" in text]

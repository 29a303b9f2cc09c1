"""Engines tell routers what they have cached, where they have a key and routers would ask (docs/kv-events.md)."""

import itertools
import json
from pathlib import Path

import pytest

from support.helm_chart import Chart, default, notes
from support.helm_checks import complaints
from support.helm_objects import COMPONENT, WORKLOADS, container, flag, kind, pool, router, templates

pytestmark = pytest.mark.processes


ROLES = ("prefill", "decode")
KEYED = {"engine": {"apiKey": {"secretName": "engines"}}}


def flags_of(objects):
    """Return the flags of the router."""
    return dict(itertools.pairwise(container(templates(router(objects))[0])["args"]))


def keyed(role, more):
    """Return values with a key for all engines, and more for one pool."""
    return KEYED | {role: more}


def settings(**more):
    return KEYED | {"router": {"settings": more}}


@pytest.mark.parametrize("enabled", [True, "auto"])
def test_routers_follow_the_engines_behind_their_key(enabled):
    """No port is opened, and the sockets are in a directory that only the engine's user may enter."""
    objects = Chart().objects(KEYED | {"kvEvents": {"enabled": enabled}})
    flags = flags_of(objects)

    assert complaints(objects) == []
    assert (flags["--kv-events"], flags["--prefill-policy"], flags["--decode-policy"]) == ("auto", "prefix", "prefix")
    for role in ROLES:
        template = templates(pool(objects, role))[0]
        engine = container(template)
        (made,) = template["spec"]["initContainers"]
        config = json.loads(flag(engine["args"], "--kv-events-config"))
        folder = made["command"][-1]

        assert engine["command"] == ["python3", "/opt/pdrelay/start.py", "pdrelay,pdrelay_kv_events"]
        assert "VLLM_API_KEY" in {entry["name"] for entry in engine["env"]}
        assert ("--enable-prefix-caching" in engine["args"]) is (enabled is True)  # vLLM knows which models cannot
        assert made["command"][:-1] == ["mkdir", "-p", "-m", "0700"]
        assert {Path(config[name]).parent for name in ("endpoint", "replay_endpoint")} == {Path(f"ipc:/{folder}")}
        assert all("inproc" in config[name] for name in ("endpoint", "replay_endpoint"))  # of each rank
        assert (made["image"], made["securityContext"]) == (engine["image"], engine["securityContext"])
        mount = {"name": "run", "mountPath": str(Path(folder).parent)}
        assert mount in made["volumeMounts"]
        assert mount in engine["volumeMounts"]
        assert [port["name"] for port in engine["ports"] if "events" in port["name"]] == []


LEFT_OUT = {
    "no key": {},
    "a pool without a key": {"prefill": {"apiKey": {"secretName": "engines"}}},
    "it is switched off": KEYED | {"kvEvents": {"enabled": False}},
    "policies that forget": settings(prefill_policy="session", decode_policy="power_of_two"),
    "routers do not ask": settings(kv_events="off"),
    "no reuse_kv in routers": settings(reuse_kv=False),
    "a port of its own": keyed("decode", {"kvEvents": {"enabled": True}}),
    "no prefix cache": keyed("prefill", {"extraArgs": ["--no-enable-prefix-caching"]}),
    "a list of plugins": keyed("prefill", {"extraEnv": [{"name": "VLLM_PLUGINS", "value": "pdrelay"}]}),
    "no engines": KEYED | {"prefill": {"enabled": False}, "decode": {"enabled": False}, "tests": {"enabled": False}},
}


@pytest.mark.parametrize("values", LEFT_OUT.values(), ids=LEFT_OUT)
def test_where_no_router_could_or_would_read_engines_tell_nothing(values):
    """Without a word, for nobody asked for it; `true` is refused there, if it is a contradiction."""
    objects = Chart().objects(values)

    assert flags_of(objects).get("--kv-events", "off") == "off"
    pools = [o for o in kind(objects, *WORKLOADS) if o["metadata"]["labels"][COMPONENT] in ROLES]
    for template in [template for pool_ in pools for template in templates(pool_)]:
        assert container(template)["command"] == ["vllm"]
        assert "inproc" not in str(container(template)["args"])
        assert "initContainers" not in template["spec"]


def test_a_list_of_plugins_that_names_it_is_followed():
    """Whoever lists them knows what the image has."""
    listed = {"extraEnv": [{"name": "VLLM_PLUGINS", "value": "mine,pdrelay,pdrelay_kv_events"}]}

    assert flags_of(Chart().objects(keyed("decode", listed)))["--kv-events"] == "auto"


def test_notes_name_the_key_that_is_missing():
    """And nothing else that keeps routers from the events: an operator wrote that."""
    missing = notes()
    there = notes("--set", "engine.apiKey.secretName=engines")
    unwanted = notes("--set", "router.settings.kv_events=off")

    assert "engine.apiKey.secretName is\nempty (prefill and decode)." in missing
    assert "KV events" not in there + unwanted


@pytest.mark.parametrize("told", [{"prefill_policy": "expected_ttft"}, {"decode_policy": "expected_ttft"}])
@pytest.mark.parametrize("more", [{}, {"reuse_kv": False}], ids=["reuse", "plain"])
def test_expected_ttft_is_for_both_legs(told, more):
    """One alone is refused by the router, for the policy chooses both engines."""
    flags = flags_of(Chart().objects({"router": {"settings": told | more}}))

    assert [flags[f"--{role}-policy"] for role in ROLES] == ["expected_ttft", "expected_ttft"]


def test_expected_ttft_goes_by_events_too():
    """As the router's own check has it."""
    both = {"prefill_policy": "expected_ttft", "decode_policy": "expected_ttft"}
    objects = Chart().objects(settings(**both) | {"kvEvents": {"enabled": True}})

    assert complaints(objects) == []
    assert flags_of(objects)["--kv-events"] == "auto"


def test_settings_of_the_router_go_before_those_of_kv_events():
    """Who wants the events on one side only says so."""
    flags = flags_of(Chart().objects(settings(decode_policy="power_of_two")))

    assert (flags["--prefill-policy"], flags["--decode-policy"]) == ("prefix", "power_of_two")
    assert flags["--kv-events"] == "auto"
    assert flags_of(default())["--kv-events"] == "off"

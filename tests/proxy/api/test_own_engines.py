"""The join key: an engine's host adds, drains, undrains and removes the engines at its own address, and no others."""

import logging
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx
import pytest

from pdrelay_proxy.api.own_engines import OwnEngines
from pdrelay_proxy.app import build
from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.admission.admin_key import fingerprint
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import Role
from pdrelay_proxy.settings import Settings
from support.sim import InMemory, sims

ADMIN, JOIN = {"X-Api-Key": "sesame"}, {"X-Api-Key": "join-me"}
OWN, OTHER = "10.0.0.7", "10.0.0.8"
ENGINE, OTHERS = {"type": "decode", "instance": f"{OWN}:80"}, {"type": "decode", "instance": f"{OTHER}:80"}
NAMES = {"own.example": (OWN,), "both.example": (OWN, OTHER), "other.example": (OTHER,), "nothing.example": ()}


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "join").write_text("join-me\n")
    found = Settings(admin_key="sesame", join_key_file=str(tmp_path / "join"), health_check_interval_s=0.0)
    return replace(found, prefill=("p0:80",), decode=("d0:80", f"{OTHER}:80"), allowed_hosts=("*",))


@asynccontextmanager
async def asked_from(settings, *hosts, port="app"):
    """Yield a client of one router for each of the addresses, in front of engines at two hosts."""
    known = sims()
    engines = known | {host: sims()["d0"] for host in (OWN, OTHER)}
    network = InMemory(engines)
    built = build(settings, fabric=network.fabric)
    app = getattr(built, port)
    clients = [
        httpx.AsyncClient(transport=httpx.ASGITransport(app, client=(host, 1)), base_url="http://router", headers=JOIN)
        for host in hosts
    ]
    async with network.running(built.app):
        yield clients


async def leads_to(address):
    """Resolve as a network would."""
    if address.host == "nowhere.example":
        raise OSError("it leads nowhere")
    return NAMES.get(address.host, (address.host,))


async def order(client, verb, body, **headers):
    return (await client.post(f"/instances/{verb}", json=body, headers=headers)).status_code


async def rows(client, **headers):
    found = (await client.get("/instances", headers=headers)).json()["instances"]
    return {row["address"]: row for row in found}


@pytest.mark.parametrize("port", ["app", "admin_app"])
async def test_a_host_adds_drains_undrains_and_removes_its_own_engine(settings, port):
    """All that engine.sh does, at the clients' port or the admin port."""
    separate = replace(settings, admin_port=8081) if port == "admin_app" else settings
    async with asked_from(separate, OWN, port=port) as (client,):
        added = await order(client, "add", ENGINE)
        own = await rows(client)
        name = own[f"{OWN}:80"]["id"]
        by_address = [await order(client, verb, ENGINE) for verb in ("drain", "undrain")]
        by_id = [await order(client, verb, {"id": name}) for verb in ("drain", "undrain", "remove")]
        left = await rows(client, **ADMIN)

    assert (added, by_address, by_id) == (200, [200, 200], [200, 200, 200])
    assert own.keys() == {f"{OWN}:80"}
    assert f"{OWN}:80" not in left


async def test_all_ranks_of_an_own_address_are_own(settings):
    """Each is an engine with an id of its own."""
    async with asked_from(settings, OWN) as (client,):
        added = await order(client, "add", {**ENGINE, "instance": f"{OWN}:80#dp=2"})
        found = (await client.get("/instances")).json()["instances"]
        removed = await client.post("/instances/remove", json=ENGINE)

    assert (added, [row["rank"] for row in found], removed.status_code) == (200, [0, 1], 200)


@pytest.mark.parametrize("body", [OTHERS, {"id": "decode-1"}, {"id": "decode-9"}, {"id": "prefill-0"}, {}])
@pytest.mark.parametrize("verb", ["drain", "undrain", "remove"])
async def test_an_engine_of_another_host_cannot_be_touched_and_not_be_found(settings, verb, body):
    """By its address or its id; one that is not there is refused in the same words."""
    async with asked_from(settings, OWN) as (client,):
        before = await rows(client, **ADMIN)
        answer = await client.post(f"/instances/{verb}", json=body)
        missing = await client.post(f"/instances/{verb}", json={"type": "decode", "instance": "10.0.0.9:80"})
        after = await rows(client, **ADMIN)

    assert (answer.status_code, answer.json()) == (403, missing.json())
    assert "10.0.0.7" in answer.json()["detail"]
    assert [row["state"] for row in before.values()] == [row["state"] for row in after.values()]


async def test_at_its_own_address_a_host_learns_that_there_is_no_engine(settings):
    """A script that leaves twice is told so."""
    async with asked_from(settings, OWN) as (client,):
        assert await order(client, "remove", ENGINE) == 404


@pytest.mark.parametrize(
    "instance", [f"{OTHER}:81", f"{OTHER}:81#dp=2", "127.0.0.1:80", "d9:80", f"https://{OTHER}:81", "[::1]:80"]
)
async def test_an_engine_of_another_host_cannot_be_added(settings, instance):
    """It would get prompts that are meant for it, or be somebody else's."""
    async with asked_from(settings, OWN) as (client,):
        assert await order(client, "add", {"type": "decode", "instance": instance}) == 403


@pytest.mark.parametrize(
    ("caller", "instance", "is_own"),
    [
        (OWN, f"{OWN}:80", True),
        (OWN, f"{OTHER}:80", False),
        (OWN, "own.example:80", True),
        (OTHER, "own.example:80", False),
        (OWN, "both.example:80", False),
        (OWN, "nowhere.example:80", False),
        (OWN, "nothing.example:80", False),
    ],
)
async def test_a_name_belongs_to_the_host_to_which_it_leads(caller, instance, is_own):
    """And to none if it leads to several, or nowhere."""
    assert await OwnEngines(leads_to).are_at(caller, [Address.parse(instance)]) is is_own


async def test_an_engine_that_was_added_by_its_name_is_one_of_its_host():
    """And one whose name leads nowhere is no host's; no order of names hides another."""
    registry = Registry()
    for name in ("other.example", "own.example", "nowhere.example", OTHER, "both.example", OWN):
        registry.add(Role.DECODE, Address("http", name, 80))
    own = await OwnEngines(leads_to).among(OWN, registry.members())

    assert [member.instance.address.host for member in own] == ["own.example", OWN]


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded", "Via"])
async def test_behind_a_proxy_no_address_is_the_callers(settings, header):
    """Uvicorn takes it from X-Forwarded-For, which a process on the router's machine may send."""
    async with asked_from(settings, OWN) as (client,):
        assert await order(client, "add", ENGINE, **{header: OTHER}) == 403
        assert (await client.get("/instances", headers={header: OTHER})).status_code == 403
        assert await order(client, "add", ENGINE, **{header: OTHER}, **ADMIN) == 200


async def test_the_key_opens_nothing_else(settings, tmp_path):
    """Neither the roles of engines, nor their streams, nor what shows the fleet and requests."""
    (tmp_path / "keys").write_text("me:sk-1-of-16-chars\n")
    with_clients = replace(settings, api_keys_file=str(tmp_path / "keys"), resume_streams=True)
    question = {"path": "/v1/completions", "body": {"prompt": "a"}}
    async with asked_from(with_clients, OWN) as (client,):
        await order(client, "add", ENGINE)
        orders = [
            await order(client, "turn", {**ENGINE, "to": "prefill"}),
            await order(client, "drain", {**ENGINE, "move": True}),
            await order(client, "explain", question),
        ]
        reads = {path: (await client.get(path)).status_code for path in ("/requests/x", "/requests/x?a=b")}
        shown = {
            path: (await client.get(path)).status_code
            for path in ("/status", "/metrics", "/stats", "/", "/docs", "/openapi.json", "/v1/models")
        }
        (state,) = [row["state"] for row in (await rows(client)).values()]

    assert orders == [403, 403, 403]
    assert set(reads.values()) == {403}
    assert set(shown.values()) == {401}
    assert state != "draining"


async def test_rows_say_nothing_of_other_engines(settings):
    """The sentences of a row may name them: they are for operators."""
    async with asked_from(settings, OTHER) as (client,):
        (row,) = (await rows(client)).values()
        of_operators = (await rows(client, **ADMIN))[f"{OTHER}:80"]
        (drained,) = (await client.post("/instances/drain", json=OTHERS)).json()["instances"]

    assert [(one["why"], one["warning"]) for one in (row, drained)] == [("", None)] * 2
    assert of_operators["why"] != ""


async def test_the_audit_log_tells_it_from_the_admin_key(settings, caplog):
    """By name, with the address of the caller; also what was refused."""
    caplog.set_level(logging.INFO, "pdrelay.audit")
    async with asked_from(settings, OWN) as (client,):
        await order(client, "add", ENGINE)
        await order(client, "remove", OTHERS)
        await order(client, "turn", {**ENGINE, "to": "prefill"})
        await order(client, "drain", ENGINE, **ADMIN)

    lines = [record.getMessage() for record in caplog.records if record.name == "pdrelay.audit"]
    join = f"key=join:{fingerprint(b'join-me')} client={OWN}"
    assert lines[0] == f"action=add outcome=ok {join} target='decode {OWN}:80'"
    assert lines[1].startswith(f"action=remove outcome=refused {join} target='decode {OTHER}:80'")
    assert lines[2].startswith(f"action=turn outcome=unauthenticated {join} why=")
    assert f"key={fingerprint(b'sesame')} " in lines[3]
    assert "join-me" not in caplog.text


async def test_without_an_admin_key_engines_join_all_the_same(settings):
    """And what wants the admin key still says that there is none."""
    async with asked_from(replace(settings, admin_key=None), OWN) as (client,):
        assert await order(client, "add", ENGINE) == 200
        assert await order(client, "turn", {**ENGINE, "to": "prefill"}) == 404
        assert await order(client, "add", ENGINE, **{"X-Api-Key": "wrong"}) == 401

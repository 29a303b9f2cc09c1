"""Which processes a plan has, where they listen, and that the router is told the same."""

import sys
from pathlib import Path

import pytest

from pdrelay_proxy.core.protocol.push import TransferMode
from pdrelay_tools.local.plan import SMOLLM2_FOLDER, TINY_FOLDER, EngineKind, LocalPlan, engine_command, router_command
from pdrelay_tools.local.recipe import Connector


def test_engines_are_numbered_from_the_first_port_of_their_kind():
    """The addresses in the documentation are the addresses that people paste."""
    engines = LocalPlan(prefill=2, decode=1).engines()

    assert [(spec.name, spec.port, spec.side_channel_port) for spec in engines] == [
        ("prefill-0", 8100, 5600),
        ("prefill-1", 8101, 5601),
        ("decode-0", 8200, 5602),
    ]


def test_no_two_processes_share_a_port():
    """For any number of engines that fit between the first ports."""
    ports = [port for port, _, _ in LocalPlan(prefill=4, decode=5).ports()]

    assert len(ports) == len(set(ports)) == 1 + 2 * (4 + 5)


@pytest.mark.parametrize(
    ("model", "name"),
    [(TINY_FOLDER, "tiny"), (SMOLLM2_FOLDER, "SmolLM2-135M-Instruct"), (Path("/"), "model"), (Path("/m/x/../y"), "y")],
)
def test_clients_call_a_model_by_the_name_of_its_folder(model, name):
    """Whatever it is, it was called tiny."""
    plan = LocalPlan(model=model)

    assert {spec.served_name for spec in plan.engines()} == {plan.served_name} == {name}


def test_all_engines_have_the_same_dtype():
    """KV moves between equal ones only."""
    assert [spec.dtype for spec in LocalPlan().engines()] == [None, None]
    chosen = LocalPlan(dtype="float32").engines()
    assert ["--dtype float32" in " ".join(engine_command(LocalPlan(), spec, {}).argv) for spec in chosen] == [
        True,
        True,
    ]


def test_simulated_engines_have_no_side_channel():
    """Nothing is moved, so no port has to be free for it."""
    assert [port for port, _, _ in LocalPlan(kind=EngineKind.SIM).ports()] == [8000, 8100, 8200]


def test_every_port_names_the_option_that_moves_it():
    """That is what a message about a taken port tells."""
    options = {user: option for _, user, option in LocalPlan().ports()}

    assert options == {
        "the router": "--port",
        "prefill-0": "--prefill-port",
        "decode-0": "--decode-port",
        "the side channel of prefill-0": "--side-channel-port",
        "the side channel of decode-0": "--side-channel-port",
    }


def test_the_router_is_told_all_engines():
    """In the order of their names: the router numbers them itself, from zero."""
    command = router_command(LocalPlan(prefill=1, decode=2, port=9000), {})

    assert list(command.argv[:5]) == [sys.executable, "-P", "-m", "pdrelay_proxy.cli", "serve"]
    assert "--prefill 127.0.0.1:8100 --decode 127.0.0.1:8200 127.0.0.1:8201" in " ".join(command.argv)
    assert command.health_url == "http://127.0.0.1:9000/health"


def test_one_flag_switches_both_halves_of_kv_events():
    """The engines tell, and the router's policies go by it; the paths of sockets are short wherever one works."""
    plan = LocalPlan(kv_events=True)
    argv = " ".join(router_command(plan, {}).argv)

    assert "--kv-events auto --prefill-policy prefix --decode-policy prefix" in argv
    assert {spec.kv_events for spec in plan.engines()} == {Path(".pdrelay/kv-events")}
    assert "--kv-events" not in router_command(LocalPlan(), {}).argv


def test_a_vllm_engine_is_started_by_the_recipe():
    """With the connector and the model of the plan."""
    plan = LocalPlan(connector=Connector.NIXL, model=Path("/models/mine"))

    argv = " ".join(engine_command(plan, plan.engines()[0], {}).argv)

    assert "NixlConnector" in argv
    assert "--model /models/mine" in argv


@pytest.mark.parametrize("kind", EngineKind)
def test_every_engine_of_a_plan_has_its_mode(kind):
    """Prefill and decode must agree on who moves the KV cache."""
    plan = LocalPlan(kind=kind, mode=TransferMode.PUSH)

    assert all("push" in " ".join(engine_command(plan, spec, {}).argv) for spec in plan.engines())


def test_a_plan_that_returns_kv_sets_both_sides():
    """Engines that lend, and a router that knows where conversations are."""
    plan = LocalPlan(return_kv=True)

    assert all(spec.extra_connector_config == {"return_kv": True} for spec in plan.engines())
    assert " ".join(router_command(plan, {}).argv).endswith(
        "--return-kv true --prefill-policy prefix --decode-policy prefix"
    )
    assert "--return-kv" not in router_command(LocalPlan(), {}).argv


def test_engines_offer_what_the_router_uses():
    """Ours tell of their caches and return KV where they can; others are served without, and simulated ones too."""
    ours, others, pretended = (
        LocalPlan(reuse_kv=True, **more) for more in ({}, {"connector": Connector.NIXL}, {"kind": EngineKind.SIM})
    )

    assert {spec.kv_events for spec in ours.engines()} == {Path(".pdrelay/kv-events")}
    assert all(spec.extra_connector_config == {"return_kv": "auto"} for spec in ours.engines())
    assert {spec.kv_events for plan in (others, pretended) for spec in plan.engines()} == {None}
    assert not any(spec.extra_connector_config for plan in (others, pretended) for spec in plan.engines())
    for plan in (ours, others, pretended):
        assert router_command(plan, {}).argv[-2:] == ["--reuse-kv", "true"]
    asked_for = LocalPlan(reuse_kv=True, return_kv=True).engines()
    assert all(spec.extra_connector_config == {"return_kv": True} for spec in asked_for)  # it is refused, if it cannot


def test_options_for_engines_go_to_all_of_them_and_not_to_the_router():
    """Tools need a parser on both sides: either engine may answer alone."""
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    plan = LocalPlan(engine_args=tools)

    assert [tuple(engine_command(plan, spec, {}).argv[-3:]) for spec in plan.engines()] == [tools] * 2
    assert "hermes" not in router_command(plan, {}).argv


def test_the_router_gets_the_path_of_its_key():
    """A key among the arguments would be seen by every user of the machine."""
    argv = router_command(LocalPlan(has_own_key=True, admin_port=9001), {}).argv

    assert " ".join(argv).endswith("--admin-port 9001 --admin-key-file .pdrelay/admin-key")

"""How an engine is started: what the arguments and the environment promise."""

import dataclasses
import json
import shlex
import sys
from pathlib import Path

import pytest

from pdrelay_proxy.core.model import Role
from pdrelay_proxy.core.protocol.push import TransferMode
from pdrelay_tools.local.recipe import (
    Connector,
    EngineSpec,
    argv,
    engine,
    environment,
    shell_line,
    transfer_config,
    with_plugins,
    with_secret,
)


def spec(**changes):
    return EngineSpec(**{"name": "p0", "port": 8100, "model": Path("/models/tiny"), **changes})


def option(arguments, name):
    return arguments[len(arguments) - arguments[::-1].index(name)]


def test_an_engine_runs_with_this_python_and_listens_on_loopback_only():
    """Nothing of a test machine is reachable from outside."""
    arguments = argv(spec())

    assert arguments[0] == sys.executable
    assert option(arguments, "--host") == "127.0.0.1"
    assert option(arguments, "--port") == "8100"
    assert option(arguments, "--model") == "/models/tiny"


def test_an_engine_without_a_connector_gets_no_transfer_config():
    """It is the reference that disaggregated answers are compared with."""
    assert "--kv-transfer-config" not in argv(spec())


@pytest.mark.parametrize(
    ("role", "kv_role"), [(Role.PREFILL, "kv_producer"), (Role.DECODE, "kv_consumer"), (None, "kv_both")]
)
def test_our_connector_is_loaded_by_path_and_knows_its_role(role, kv_role):
    """vLLM does not ship it, so it needs the module path."""
    config = json.loads(
        option(argv(spec(role=role, connector=Connector.PDRELAY, side_channel_port=5600)), "--kv-transfer-config")
    )

    assert config == {
        "kv_connector": "PDRelayConnector",
        "kv_connector_module_path": "pdrelay_connector",
        "kv_role": kv_role,
        "kv_load_failure_policy": "recompute",
    }


@pytest.mark.parametrize("role", [*Role, None])
def test_an_engine_that_returns_kv_plays_both_roles(role):
    """It lends in both directions."""
    returns = {"extra_connector_config": {"return_kv": True}, "connector": Connector.PDRELAY, "side_channel_port": 5600}

    assert transfer_config(spec(role=role, **returns))["kv_role"] == "kv_both"


@pytest.mark.parametrize("role", [*Role, None])
def test_the_in_tree_connector_plays_both_roles(role):
    """vLLM's documentation starts it with kv_both on either side."""
    config = transfer_config(spec(role=role, connector=Connector.NIXL, side_channel_port=5600))

    assert config["kv_connector"] == "NixlConnector"
    assert config["kv_role"] == "kv_both"
    assert "kv_connector_module_path" not in config


def test_a_pushing_engine_has_its_connectors_way_to_say_so():
    """Ours has a setting for it, vLLM has another connector; what a test sets beside it is kept."""
    extra = {"extra_connector_config": {"kv_lease_duration": 2}, "side_channel_port": 5600}
    ours = transfer_config(spec(connector=Connector.PDRELAY, mode=TransferMode.PUSH, **extra))
    theirs = transfer_config(spec(connector=Connector.NIXL, mode=TransferMode.PUSH, **extra))

    assert ours["kv_connector"] == "PDRelayConnector"
    assert ours["kv_connector_extra_config"] == {"mode": "push", "kv_lease_duration": 2}
    assert theirs["kv_connector"] == "NixlPushConnector"
    assert theirs["kv_connector_extra_config"] == {"kv_lease_duration": 2}


def test_an_engine_tells_of_its_cache_over_sockets_of_its_own():
    """Engines share the directory; and without `inproc` in the path ranks would share a socket, as vLLM has it."""
    telling = spec(kv_events=Path("run"), port=8101)
    config = json.loads(option(argv(telling), "--kv-events-config"))

    assert config == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "ipc://run/8101-inproc.ipc",
        "replay_endpoint": "ipc://run/8101-inproc-replay.ipc",
    }
    assert environment(telling, {})["VLLM_PLUGINS"] == "pdrelay,pdrelay_kv_events"
    assert environment(telling, {"VLLM_PLUGINS": "mine"})["VLLM_PLUGINS"] == "mine,pdrelay,pdrelay_kv_events"
    assert shell_line(telling).startswith("VLLM_PLUGINS=pdrelay,pdrelay_kv_events vllm serve ")


def test_other_engines_load_the_plugins_that_they_would():
    """The variable also keeps plugins from being loaded."""
    assert "VLLM_PLUGINS" not in environment(spec(), {})
    assert "--kv-events-config" not in argv(spec())


def test_plugins_of_the_installation_stay_loaded(tmp_path, monkeypatch):
    """As soon as the variable names ours, vLLM loads only those that it names: a platform of its own would be gone."""
    (tmp_path / "theirs-1.dist-info").mkdir()
    points = "[vllm.platform_plugins]\ntheirs = theirs:register\n[vllm.endpoint_plugins]\nroute = theirs:route\n"
    (tmp_path / "theirs-1.dist-info/entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(tmp_path)
    named = environment(spec(timelines=True), with_plugins({}))["VLLM_PLUGINS"].split(",")

    assert {"theirs", "pdrelay", "pdrelay_timelines"} <= set(named)
    assert "route" not in named, "vLLM loads it only where a user names it"
    assert len(named) == len(set(named))
    assert with_plugins({"VLLM_PLUGINS": "mine"}) == {"VLLM_PLUGINS": "mine"}


def test_extra_arguments_come_last_because_the_last_one_wins():
    """A test may override anything that the recipe chooses."""
    arguments = argv(spec(extra_args=("--max-model-len", "512")))

    assert arguments[-2:] == ["--max-model-len", "512"]
    assert arguments.index("--max-model-len") < len(arguments) - 2


def test_the_side_channel_is_on_loopback_at_the_port_of_the_spec():
    """Two engines on one machine need two ports."""
    variables = environment(spec(connector=Connector.PDRELAY, side_channel_port=5601), {})

    assert variables["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"
    assert variables["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5601"


def test_an_engine_keeps_the_environment_it_is_started_from():
    """PATH, certificates, proxies."""
    assert environment(spec(), {"PATH": "/bin"})["PATH"] == "/bin"


@pytest.mark.parametrize("name", ["VLLM_CPU_KVCACHE_SPACE", "VLLM_RPC_BASE_PATH"])
def test_variables_that_would_override_the_recipe_are_dropped(name):
    """The first beats --kv-cache-memory-bytes, in GiB; the second TMPDIR, which every engine has of its own."""
    assert name not in environment(spec(), {name: "40"})


def test_extra_variables_win():
    """A test may override anything that the recipe chooses."""
    assert environment(spec(extra_env={"OMP_NUM_THREADS": "2"}), {})["OMP_NUM_THREADS"] == "2"


def test_nothing_is_written_to_the_home_directory(tmp_path):
    """Caches live in a directory that `make clean` removes."""
    variables = environment(spec(cache_dir=tmp_path), {"HOME": "/home/someone"})

    caches = [value for key, value in variables.items() if key in {"XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HF_HOME"}]
    assert len(caches) == 3
    assert all(Path(cache).is_relative_to(tmp_path) for cache in caches)


def test_an_engine_is_watched_at_its_own_health_endpoint():
    """Readiness means that the engine itself answers."""
    command = engine(spec(), {})

    assert command.name == "p0"
    assert command.health_url == "http://127.0.0.1:8100/health"


def test_a_connector_without_a_side_channel_port_is_refused():
    """All engines would share vLLM's default port, and only the first would start."""
    with pytest.raises(ValueError, match="engine p0 has connector pdrelay but no side_channel_port"):
        spec(connector=Connector.PDRELAY)


@pytest.mark.parametrize("block_size", [0, 16, 33])
def test_a_block_size_that_cpu_attention_cannot_serve_is_refused(block_size):
    """vLLM would say so half a minute later, in the middle of a traceback."""
    with pytest.raises(ValueError, match=f"block_size {block_size}: a CPU engine needs a multiple of 32"):
        spec(block_size=block_size)


def test_the_line_to_type_has_the_same_options():
    """Documentation shows it; what it shows must be what runs."""
    one = spec(connector=Connector.NIXL, side_channel_port=5600)

    line = shell_line(one)

    assert line.startswith("VLLM_NIXL_SIDE_CHANNEL_PORT=5600 vllm serve /models/tiny --served-model-name tiny ")
    assert shlex.split(line)[4:] == argv(one)[6:]


def test_an_engine_can_run_on_another_host_of_this_machine():
    """Such as a network namespace: it serves HTTP at one address there, and meets other engines at another one."""
    elsewhere = spec(
        host="10.0.0.2", side_channel_host="10.1.0.2", side_channel_port=5600, prefix=("ip", "netns", "exec", "a")
    )

    assert argv(elsewhere)[:5] == ["ip", "netns", "exec", "a", sys.executable]
    assert option(argv(elsewhere), "--host") == "10.0.0.2"
    assert engine(elsewhere, {}).health_url == "http://10.0.0.2:8100/health"
    assert environment(elsewhere, {})["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.1.0.2"


def test_nixl_listens_on_loopback_where_the_side_channel_does():
    """Whoever reaches its port reads and writes the engine's memory; an operator's own choice stays."""
    local = spec(connector=Connector.NIXL, side_channel_port=5600)
    elsewhere = dataclasses.replace(local, side_channel_host="10.1.0.2")

    assert environment(local, {})["UCX_NET_DEVICES"] == "lo"
    assert environment(local, {"UCX_NET_DEVICES": "eth1"})["UCX_NET_DEVICES"] == "eth1"
    assert "UCX_NET_DEVICES" not in environment(elsewhere, {})


@pytest.mark.parametrize("variable", ["PDRELAY_CONNECTOR_SECRET", "PDRELAY_CONNECTOR_SECRET_FILE"])
def test_engines_share_the_operators_secret_or_that_of_the_folder(variable, tmp_path):
    """Other users of this machine can reach loopback, too; they can read no file of this one."""
    drawn = tmp_path / "connector-secret"

    assert with_secret({"PATH": "/bin"}, drawn) == {"PATH": "/bin", "PDRELAY_CONNECTOR_SECRET_FILE": str(drawn)}
    assert with_secret({variable: "mine"}, drawn) == {variable: "mine"}

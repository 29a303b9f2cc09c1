"""examples/07-compose: each service's command and health check run here as processes, with simulated engines."""

import re
import sys

import pytest
import yaml

from pdrelay_tools.local.processes import Command, open_fleet
from support.bare_metal import EXAMPLES, command_lines, new_site, program, run, secrets_in
from support.dockerfiles import stages
from support.helm_chart import ROOT

FILE = EXAMPLES / "07-compose" / "compose.yaml"
ENGINES = ("prefill", "decode")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]
with_processes = pytest.mark.slow  # a router and engines start, each a Python of its own


def interpolated(value):
    """Put defaults in place of variables, as Compose does where none is set."""
    if isinstance(value, dict):
        return {key: interpolated(one) for key, one in value.items()}
    if isinstance(value, list):
        return [interpolated(one) for one in value]
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value) if isinstance(value, str) else value


COMPOSE = interpolated(yaml.safe_load(FILE.read_text()))
SERVICES = COMPOSE["services"]


def entrypoint_of(service):
    if "entrypoint" in SERVICES[service]:
        return SERVICES[service]["entrypoint"]
    steps = stages((ROOT / "helm/images/router.Dockerfile").read_text())[-1]
    (step,) = [step for step in steps if step.word == "ENTRYPOINT"]
    return yaml.safe_load(step.rest)


@pytest.fixture
def site(tmp_path):
    return new_site(tmp_path)


@pytest.fixture
def placed(site):
    """What stands in the file, where it is on this machine."""
    ports = dict(zip(("8000", "8100", "8200"), map(str, site.ports), strict=True))

    def place(text):
        text = re.sub(r"\b(prefill|decode):(\d+)", r"127.0.0.1:\2", text).replace("0.0.0.0", "127.0.0.1")
        text = re.sub(r"\b(8000|8100|8200)\b", lambda m: ports[m[1]], text)
        text = text.replace("/run/secrets", str(site.secrets)).replace("$$", "$")
        return {"prefill": "127.0.0.1", "decode": "127.0.0.1", "python3": sys.executable}.get(text, text)

    return place


def _health_urls(site):
    router, prefill, decode = site.ports
    paths = {"prefill": f"{prefill}/health", "decode": f"{decode}/health", "router": f"{router}/ready"}
    return {name: f"http://127.0.0.1:{path}" for name, path in paths.items()}


@pytest.fixture
def children(site, placed, tmp_path):
    """All services, engines first, as `depends_on` says; each with its own environment and nothing else."""
    with open_fleet(tmp_path / "logs") as fleet:
        found = {}
        for service, url in _health_urls(site).items():
            argv = [placed(word) for word in (*entrypoint_of(service), *SERVICES[service]["command"])]
            given = {k: placed(v) for k, v in SERVICES[service].get("environment", {}).items() if k != "HOME"}
            found[service] = fleet.start(Command(service, argv, site.environment | given, url))
        fleet.wait_ready(found.values(), timeout_s=200)
        yield found


@with_processes
def test_the_services_serve_together_and_their_health_checks_pass(site, placed, children):
    """A request goes over both legs, an engine is drained by its name, and no argument shows a secret."""
    answer = site.ask(model=SERVICES["prefill"]["command"][3])
    checks = {name: [placed(word) for word in SERVICES[name]["healthcheck"]["test"][1:]] for name in children}
    key = ["--router", site.router, "--key-file", str(site.secrets / "admin-key")]

    assert answer.status_code == 200, answer.text
    assert {name: run(check, site.environment).returncode for name, check in checks.items()} == dict.fromkeys(checks, 0)
    assert [secrets_in(command_lines(child.pid)) for child in children.values()] == [[], [], []]
    assert site.given(site.ports[1])["env"]["PDRELAY_CONNECTOR_SECRET_FILE"] == str(site.secrets / "connector-secret")
    done = run([site.programs / "pdrelay", "instances", *key, "drain", "--wait", "20", f"127.0.0.1:{site.ports[2]}"],
               site.environment)  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("text", ["", "\n", None], ids=["empty", "blank", "unreadable"])
@pytest.mark.parametrize("service", ENGINES)
def test_an_engine_without_a_key_does_not_start(site, placed, service, text):
    """vLLM with an empty VLLM_API_KEY serves everybody who reaches its port."""
    key = site.secrets / "engine-key"
    key.unlink()
    if text is not None:
        key.write_text(text)
    program(site, "vllm", "echo it has started")
    done = run([placed(word) for word in (*entrypoint_of(service), *SERVICES[service]["command"])], site.environment)

    assert (done.returncode, done.stdout) == (1, "")
    assert "engine-key" in done.stderr


def test_a_health_check_fails_where_nobody_listens(site, placed):
    """Else it would always pass."""
    for name in (*ENGINES, "router"):
        check = [placed(word) for word in SERVICES[name]["healthcheck"]["test"][1:]]
        assert run(check, site.environment).returncode != 0


def test_what_is_named_is_there():
    """Secrets, networks, volumes and services; and every secret is a file."""
    used = {key: set() for key in ("secrets", "networks")}
    for service in SERVICES.values():
        for key, names in used.items():
            names.update(service.get(key, ()))
        assert set(service.get("depends_on", {})) <= set(SERVICES)
        volumes = {volume.partition(":")[0] for volume in service.get("volumes", ())}
        assert volumes <= set(COMPOSE["volumes"])

    assert used == {key: set(COMPOSE[key]) for key in used}
    assert all(one == {"file": f"./secrets/{name}"} for name, one in COMPOSE["secrets"].items())
    given = [line for line in FILE.read_text().splitlines() if re.search(r"(?i)^ +\w*(key|token|password): \S", line)]
    assert [line for line in given if "{file: ./secrets/" not in line] == []


def test_the_images_are_those_of_the_chart():
    """They are built once, under the names that helm/images/build.sh gives them; the chart has no default."""
    version = yaml.safe_load((ROOT / "helm/pdrelay/Chart.yaml").read_text())["appVersion"]

    for name, image in (("router", "router"), ("prefill", "engine"), ("decode", "engine"), ("cache", "engine")):
        assert SERVICES[name]["image"] == f"localhost/pdrelay/{image}:{version}"


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_is_as_restricted_as_the_charts_pods(service):
    """And only the one that gives the cache to its user is root, for a moment and without a network."""
    given = SERVICES[service]

    assert given["cap_drop"] == ["ALL"]
    assert given["security_opt"] == ["no-new-privileges:true"]
    assert given["read_only"] is True
    assert not {"privileged", "pid", "ipc"} & set(given)
    assert (given.get("user"), given.get("network_mode")) in ((None, None), ("0:0", "none"))
    assert all(one.startswith("127.0.0.1:") for one in given.get("ports", ()))
    assert service == "cache" or "healthcheck" in given


def test_a_service_has_time_to_end():
    """Docker kills what takes longer than the grace period."""
    for name in (*ENGINES, "router"):
        words = SERVICES[name]["command"]
        longest = sum(
            int(words[words.index(flag) + 1]) for flag in ("--shutdown-timeout", "--drain-grace") if flag in words
        )
        assert int(SERVICES[name]["stop_grace_period"].removesuffix("s")) >= longest + 10

"""examples/06-systemd: the units' own commands run here, with simulated engines and the credentials as files."""

import os
import re
import shlex
import shutil
import subprocess
import tomllib
from dataclasses import replace

import pytest

from pdrelay_tools.local.processes import Command, open_fleet
from support.bare_metal import EXAMPLES, command_lines, new_site, run, secrets_in
from support.cluster import free_ports

FOLDER = EXAMPLES / "06-systemd"
UNITS = sorted(FOLDER.glob("*.service"))
pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]
with_processes = pytest.mark.slow  # a router and engines start, each a Python of its own


def directives(unit):
    """Return the settings of a unit file: name -> values, in their order."""
    text = re.sub(r"\\\n\s*", " ", (FOLDER / unit).read_text())
    found = {}
    for name, value in re.findall(r"(?m)^(\w+)=(.*)$", text):
        found.setdefault(name, []).append(value)
    return found


@pytest.fixture
def site(tmp_path):
    found = replace(new_site(tmp_path), admin_port=free_ports(1)[0])
    (tmp_path / "state").mkdir()
    (tmp_path / "cache").mkdir()
    return found


class Unit:
    """A unit's commands and environment, as systemd would make them on this site."""

    def __init__(self, site, name, instance="", **more):
        self._site, self.settings = site, directives(name)
        places = {"%i": instance, "%C": str(site.folder / "cache"), "/opt/pdrelay/libexec": str(EXAMPLES)}
        places |= dict.fromkeys(("/opt/pdrelay/bin", "/opt/vllm/bin"), str(site.programs)) | {
            "/etc/pdrelay": str(FOLDER)
        }
        self._places = places
        self.environment = dict(site.environment)
        self.environment["CREDENTIALS_DIRECTORY"] = self._credentials()
        if "StateDirectory" in self.settings:
            self.environment["STATE_DIRECTORY"] = str(site.folder / "state")
        for line in self.settings.get("Environment", ()):
            self.environment |= dict(word.split("=", 1) for word in shlex.split(self._placed(line)))
        for path in self.settings.get("EnvironmentFile", ()):
            lines = (FOLDER / self._placed(path)).read_text().splitlines()
            self.environment |= dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
        self.environment |= more

    def _placed(self, text):
        for old, new in self._places.items():
            text = text.replace(old, new)
        return text

    def _credentials(self):
        """A directory with what LoadCredential names, and nothing else."""
        folder = self._site.folder / f"credentials-{len(list(self._site.folder.iterdir()))}"
        folder.mkdir(mode=0o700)
        for line in self.settings["LoadCredential"]:
            name, _, source = line.partition(":")
            shutil.copy(self._site.secrets / source.rpartition("/")[2], folder / name)
        return str(folder)

    def command(self, name):
        (line,) = self.settings[name]
        line = re.sub(r"\$\{(\w+)\}", lambda m: self.environment[m[1]], self._placed(line.lstrip("-")))
        return shlex.split(line)

    def run(self, name):
        return run(self.command(name), self.environment)


@pytest.fixture
def fleet(tmp_path):
    with open_fleet(tmp_path / "logs") as found:
        yield found


@pytest.fixture
def units(site):
    """The router, and an engine of each role."""
    _, prefill, decode = site.ports
    here = {
        "ADDRESS": "127.0.0.1",
        "PDRELAY_ROUTER": site.operators,
        "MODEL": "m",
        "SERVED_NAME": "m",
        "DRAIN_S": "120",
    }
    engine = "pdrelay-engine@.service"
    return {
        "router": Unit(site, "pdrelay-router.service"),
        "prefill": Unit(site, engine, "prefill-0", **here, PORT=str(prefill)),
        "decode": Unit(site, engine, "decode-0", **here, PORT=str(decode), PRETENDED_TOKEN_S="0.02"),
    }


def start(fleet, site, units, *, which=("router", "prefill", "decode")):
    ports = dict(zip(("router", "prefill", "decode"), site.ports, strict=True))
    children = {}
    for name in which:
        argv = units[name].command("ExecStart")
        if name == "router":
            argv += ["--host", "127.0.0.1", "--port", str(ports["router"])]
            argv += ["--admin-host", "127.0.0.1", "--admin-port", str(site.admin_port)]
        path = "/ready" if name == "router" else "/health"
        children[name] = fleet.start(
            Command(name, argv, units[name].environment, f"http://127.0.0.1:{ports[name]}{path}")
        )
    fleet.wait_ready(children.values(), timeout_s=200)
    return children


def joined(units):
    for role in ("prefill", "decode"):
        done = units[role].run("ExecStartPost")
        assert done.returncode == 0, done.stderr


@with_processes
def test_engines_join_serve_and_leave_without_an_error(fleet, site, units):
    """A stream that runs when a decode engine is stopped comes to its end first."""
    start(fleet, site, units)
    joined(units)
    joined(units)  # after a crash, for which systemd runs no ExecStop, an engine is known already
    assert site.ask().status_code == 200
    assert len(site.instances()) == 2

    with site.streaming(40) as came:
        done = units["decode"].run("ExecStop")
        # The engine was told to leave while the stream ran, and left after its end.
        assert (done.returncode, done.stderr) == (0, "")
    assert [came[-2], sum(line.startswith("data: {") for line in came) >= 40] == ["data: [DONE]", True]
    assert list(site.instances()) == [f"127.0.0.1:{site.ports[1]}"]
    assert units["prefill"].run("ExecStop").returncode == 0
    assert site.instances() == {}


@with_processes
def test_a_router_that_starts_again_knows_its_engines(fleet, site, units):
    """They joined once, and its state directory remembers them."""
    children = start(fleet, site, units)
    joined(units)
    fleet.stop(children["router"])
    start(fleet, site, units, which=("router",))

    assert len(site.instances()) == 2
    assert site.ask().status_code == 200


@with_processes
def test_secrets_are_in_files_and_never_in_arguments(fleet, site, units):
    """Of the router, of engines, and of what the units run beside them; an engine gets no client's and no admin key."""
    children = start(fleet, site, units)
    given = site.given(site.ports[2])
    loaded = {
        name: {line.partition(":")[0] for line in unit.settings["LoadCredential"]} for name, unit in units.items()
    }

    assert [secrets_in(command_lines(child.pid)) for child in children.values()] == [[], [], []]
    assert secrets_in(given["argv"]) == []
    assert given["env"]["PDRELAY_CONNECTOR_SECRET_FILE"].endswith("/connector-secret")
    assert loaded["router"] == {"client-keys", "engine-key", "admin-key", "join-key"}
    assert loaded["prefill"] == loaded["decode"] == {"connector-secret", "engine-key", "join-key"}
    for path in FOLDER.glob("*.env"):
        settings = [line for line in path.read_text().splitlines() if not line.startswith("#")]
        assert not [line for line in settings if re.search("(?i)key|secret|token", line)]


def seconds(pattern, text):
    return int(re.search(pattern, text)[1])


def test_a_router_has_time_to_drain_and_an_engine_too():
    """systemd kills what takes longer."""
    router, engine = directives("pdrelay-router.service"), directives("pdrelay-engine@.service")
    settings = (FOLDER / "pdrelay-router.toml").read_text()
    script = (EXAMPLES / "engine.sh").read_text()
    ending = seconds(r"drain_grace_s = (\d+)", settings) + seconds(r"shutdown_timeout_s = (\d+)", settings)
    leaving = seconds(r"DRAIN_S:-(\d+)", script) + seconds(r"--shutdown-timeout (\d+)", script)

    assert int(router["TimeoutStopSec"][0]) >= ending + 10
    assert int(engine["TimeoutStopSec"][0]) >= leaving + 10
    assert int(engine["TimeoutStartSec"][0]) > seconds(r"JOIN_S:-(\d+)", script)


@pytest.fixture
def analyzed(tmp_path):
    """The units where systemd-analyze finds the programs that they name."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    for unit in UNITS:
        text = re.sub(r"/opt/[\w/.-]+", "/bin/true", unit.read_text())
        (tmp_path / unit.name.replace("@.", "@decode-0.")).write_text(text)
    return sorted(tmp_path.glob("*.service"))


def test_systemd_understands_every_line(analyzed):
    """An unknown directive is a warning there, and its protection is not there."""
    done = subprocess.run(["systemd-analyze", "verify", *analyzed], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("unit", "most"), [("pdrelay-router.service", "15"), ("pdrelay-engine@decode-0.service", "40")]
)
def test_systemd_finds_little_exposed(analyzed, unit, most):
    """Its own measure, in tenths: 100 is a unit without any hardening. Engines see devices and may make code."""
    (path,) = [one for one in analyzed if one.name == unit]
    argv = ["systemd-analyze", "security", "--offline=yes", f"--threshold={most}", "--no-pager", path]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C.UTF-8"})

    assert done.returncode == 0, done.stdout[-2000:] + done.stderr


@pytest.mark.parametrize(
    ("argument", "given", "said"),
    [
        ("", {}, "say run, join or leave"),
        ("start", {"ROLE": "decode"}, "start is not run, join or leave"),
        ("run", {"ROLE": "both"}, "ROLE is both, and must be prefill or decode"),
        ("run", {"ROLE": ""}, "ROLE is prefill or decode"),
        ("run", {"ROLE": "decode", "SECRETS": ""}, "SECRETS names the directory"),
        ("run", {"ROLE": "decode", "MODEL": ""}, "MODEL is what vllm serve is given"),
        ("join", {"ROLE": "decode", "JOIN_S": "0"}, "does not answer"),
        ("join", {"ROLE": "decode", "JOIN_S": "9", "MAINPID": "999999999"}, "the engine has ended"),
        ("leave", {"ROLE": "decode"}, "the router at http://127.0.0.1:9 cannot be asked"),
    ],
)
def test_the_script_says_what_it_lacks(site, argument, given, said):
    """In a sentence, and with an exit code that a service manager sees."""
    environment = {**site.environment, "ADDRESS": "127.0.0.1", "PORT": "9", "SECRETS": str(site.secrets), "MODEL": "m"}
    environment |= {"PDRELAY_ROUTER": "http://127.0.0.1:9", **given}
    done = run([str(EXAMPLES / "engine.sh"), *([argument] if argument else [])], environment)

    assert done.returncode != 0
    assert said in done.stderr


def test_an_engine_without_a_key_does_not_start(site):
    """vLLM with an empty VLLM_API_KEY serves everybody."""
    (site.secrets / "engine-key").chmod(0o600)
    (site.secrets / "engine-key").write_text("\n")
    environment = {**site.environment, "ROLE": "decode", "ADDRESS": "127.0.0.1", "MODEL": "m"}
    done = run([str(EXAMPLES / "engine.sh"), "run"], environment | {"SECRETS": str(site.secrets)}, timeout=60)

    assert done.returncode != 0
    assert "engine-key is empty" in done.stderr


def test_operators_have_a_port_of_their_own_in_the_engines_network():
    """The join key is in every request of `join` and `leave`: it stays out of the clients' network."""
    settings = tomllib.loads((FOLDER / "pdrelay-router.toml").read_text())
    routers = {re.search(r"(?m)^PDRELAY_ROUTER=(.*)$", path.read_text())[1] for path in FOLDER.glob("*.env")}

    assert routers == {f"http://{settings['admin_host']}:{settings['admin_port']}"}
    assert settings["admin_host"] not in ("0.0.0.0", "::")

"""Names of engines that do not resolve for a while: a router process whose hosts and resolver are the test's."""

import subprocess
from contextlib import ExitStack, contextmanager

import pytest
from tests.proxy.test_front_door import JSON, Front, request

from support.router_process import RouterProcess
from support.sim import serving, sims, until

pytestmark = pytest.mark.processes


FLAGS = ("--health-check-interval", "0.05", "--health-check-failures", "1")
BIND = 'for file in hosts resolv.conf nsswitch.conf; do mount --bind "$0/$file" /etc/$file || exit 1; done; exec "$@"'


def within(folder):
    """Return a command that runs another one, for which these files are those of /etc."""
    return ["unshare", "--mount", "sh", "-c", BIND, str(folder)]


class Hosts:
    """A hosts file, beside a DNS server that is not there."""

    def __init__(self, folder):
        self._path = folder / "hosts"
        (folder / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
        (folder / "nsswitch.conf").write_text("hosts: files dns\n")
        self.name("p0.test", "d0.test")

    def name(self, *names):
        """Have these names and no others lead somewhere."""
        self._path.write_text("".join(f"127.0.0.1 {name}\n" for name in ("localhost", *names)))


def counting(engine, probes):
    """Return an engine that counts its health checks, and closes each connection: the next one needs its address."""

    async def app(scope, receive, send):
        async def closing(message):
            if message["type"] == "http.response.start":
                message = message | {"headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        if scope.get("path") == "/health":
            probes.append(scope["path"])
        await engine(scope, receive, closing)

    return app


@contextmanager
def named(folder, *flags):
    """Run a router that knows its engines by names; yield it, its hosts and the health checks that have come."""
    hosts = Hosts(folder)
    try:
        subprocess.run([*within(folder), "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a process cannot be given an /etc/hosts of its own here: that takes root and CAP_SYS_ADMIN")
    probes = {"p0": [], "d0": []}
    with ExitStack() as stack:
        words = []
        for name, engine in sims().items():
            port = stack.enter_context(serving(counting(engine, probes[name]))).rpartition(":")[2]
            words += ["--prefill" if name == "p0" else "--decode", f"{name}.test:{port}"]
        router = RouterProcess(folder / "router.log", *words, *FLAGS, *flags, within=within(folder))
        stack.callback(router.kill)
        yield Front(router.started(), {}, None), hosts, probes
        assert "Traceback" not in router.said, router.said


def serves(door):
    """A stream, or a whole answer, by connections that are opened for it."""
    bodies = [b'{"prompt": "once upon", "max_tokens": 3%b}' % more for more in (b"", b', "stream": true')]
    return [door.status(request(body=body, lines=(JSON, "Connection: close"))) for body in bodies] == [200, 200]


def test_engines_whose_names_do_not_resolve_serve_on_and_are_not_blamed(tmp_path):
    """Their last good addresses are used, for requests and health checks alike, and one line says so."""
    with named(tmp_path) as (door, hosts, probes):
        until(lambda: serves(door), seconds=60)
        hosts.name()
        until(lambda: "names of engines do not resolve" in door.process.said, seconds=60)
        before = {name: len(found) for name, found in probes.items()}
        assert all(serves(door) for _ in range(10))
        until(lambda: all(len(found) > before[name] + 10 for name, found in probes.items()), seconds=60)
        assert all(serves(door) for _ in range(10))
        hosts.name("p0.test", "d0.test")
        until(lambda: "the names of engines resolve again" in door.process.said, seconds=60)
        assert all(serves(door) for _ in range(3))

        said = [line for line in door.process.said.splitlines() if "WARNING" in line or "ERROR" in line]
        assert [line.partition("(")[0].split(" ", 4)[4].strip() for line in said] == [
            "names of engines do not resolve"
        ], said
        assert door.metric("pdrelay_retries_total") == 0

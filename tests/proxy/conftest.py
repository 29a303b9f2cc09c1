"""What all tests of the router share."""

import pytest

from pdrelay_proxy.cli import main
from pdrelay_proxy.settings import Settings
from support.certificates import one_authority  # noqa: F401 (a fixture of every test)
from support.sim import cluster


@pytest.fixture
def running(monkeypatch):
    monkeypatch.setenv("ADMIN_API_KEY", "sesame")
    with cluster(1, 1, Settings(admin_key="sesame", health_check_interval_s=0.0)) as found:
        yield found


@pytest.fixture
def command(running, capsys):
    """Run a command against the router; give its exit code, output and errors."""

    def run(name, *arguments):
        code = main([name, "--router", running.router, *arguments])
        return code, *capsys.readouterr()

    return run

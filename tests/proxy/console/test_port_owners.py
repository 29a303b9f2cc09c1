"""The admin key that `pdrelay up` has drawn is shown to processes of its owner alone: others may take a free port."""

import os
import socket
from contextlib import ExitStack, contextmanager

import pytest

from pdrelay_proxy.cli import main
from pdrelay_proxy.console.port_owners import port_owners, why_not_of
from pdrelay_proxy.settings import Settings
from support.sim import cluster

pytestmark = pytest.mark.edges
OTHER = 65534  # a user that all systems have
COMMANDS = (["why", "x"], ["pairs"], ["instances", "list"], ["instances", "drain", "decode-0", "--wait", "1"])


@contextmanager
def listening(user, host="127.0.0.1", port=0):
    """Yield a socket of a user that listens: it belongs to the user whom the thread then is."""
    os.seteuid(user)
    try:
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    finally:
        os.seteuid(0)
    with sock:
        sock.bind((host, port))
        sock.listen()
        sock.setblocking(False)
        yield sock


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder in which `pdrelay up` was started."""
    monkeypatch.delenv("ADMIN_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".pdrelay").mkdir()
    (tmp_path / ".pdrelay/admin-key").write_text("sesame\n")


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can listen as another user")


@as_root
@pytest.mark.parametrize("command", COMMANDS, ids=str)
@pytest.mark.usefixtures("folder")
def test_a_process_of_another_user_is_not_connected_to(command, capsys):
    """The router was ended, and somebody else of this machine listens where it did."""
    name, *rest = command
    with listening(OTHER) as sock:
        port = sock.getsockname()[1]
        code = main([name, "--router", f"http://localhost:{port}", *rest])
        with pytest.raises(BlockingIOError):
            sock.accept()

    said = capsys.readouterr().err
    assert code == 1
    assert f"the key in .pdrelay/admin-key is not shown to http://localhost:{port}" in said
    assert f"another user (uid {OTHER}) listens on port {port}" in " ".join(said.split())
    assert "sesame" not in said


@as_root
@pytest.mark.usefixtures("folder")
def test_the_other_address_of_localhost_counts_too(capsys):
    """The router listens at one of the two, and a client may try the other first."""
    with ExitStack() as stack:
        port = stack.enter_context(listening(0)).getsockname()[1]
        other = stack.enter_context(listening(OTHER, "::1", port))
        assert main(["pairs", "--router", f"http://localhost:{port}"]) == 1
        with pytest.raises(BlockingIOError):
            other.accept()

    assert f"uid {OTHER}" in capsys.readouterr().err


@pytest.mark.usefixtures("folder")
def test_the_router_of_the_same_user_gets_it(capsys):
    """In the folder where it was started; nothing has to be exported."""
    with cluster(1, 1, Settings(admin_key="sesame", health_check_interval_s=0.0)) as running:
        code = main(["instances", "--router", running.router, "list"])

    assert (code, capsys.readouterr().err) == (0, "")


@as_root
def test_whose_the_key_is_counts_and_not_who_asks(folder, tmp_path, capsys):
    """Root asks the router of a user in that user's folder."""
    os.chown(tmp_path / ".pdrelay/admin-key", OTHER, OTHER)
    with listening(OTHER) as own, listening(0) as others:
        codes = [
            main(["pairs", "--timeout", "0.2", "--router", f"http://127.0.0.1:{sock.getsockname()[1]}"])
            for sock in (own, others)
        ]
        own.accept()[0].close()
        with pytest.raises(BlockingIOError):
            others.accept()

    assert codes == [1, 1]
    assert "uid 0" in capsys.readouterr().err


@as_root
def test_a_key_of_the_environment_or_a_named_file_is_shown_to_what_was_named(folder, tmp_path, monkeypatch):
    """The operator has chosen both: behind a port that another user forwards, say."""
    with listening(OTHER) as sock:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        asking = ["pairs", "--router", url, "--timeout", "0.2"]
        main([*asking, "--key-file", str(tmp_path / ".pdrelay/admin-key")])
        sock.accept()[0].close()
        monkeypatch.setenv("ADMIN_API_KEY", "sesame")
        main(asking)
        sock.accept()[0].close()


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.usefixtures("folder")
def test_a_port_on_which_nothing_listens_is_not_connected_to(scheme, capsys):
    """Another process could take it meanwhile."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        code = main(["pairs", "--router", f"{scheme}://127.0.0.1:{port}"])

    assert code == 1
    assert f"nothing listens on port {port}" in " ".join(capsys.readouterr().err.split())


def test_a_system_that_does_not_tell_is_not_trusted():
    """The key could be shown to anybody there."""
    assert why_not_of(1000, 8000, None) == "this system does not say who listens on port 8000"
    assert why_not_of(1000, 8000, {1000}) is None


def test_tables_of_a_system_are_read(tmp_path):
    """Only what listens counts, in either table; a system without IPv6 has one."""
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    row = "   0: {}:1F40 {}:{} {} 00000000:00000000 00:00000000 00000000 {:>5}        0 1766423 1 0000 100 0 0 10 0\n"
    v4 = "0100007F"
    v6 = "00000000000000000000000001000000"
    assert port_owners(8000, tables=tmp_path) is None
    rows = (row.format(v4, "00000000", "0000", "0A", 1000), row.format(v4, v4, "AB99", "01", 7))
    (tmp_path / "tcp").write_text(head + "".join(rows))
    assert [port_owners(port, tables=tmp_path) for port in (8000, 8001)] == [{1000}, set()]
    (tmp_path / "tcp6").write_text(head + row.format(v6, "0" * 32, "0000", "0A", 65534))
    assert port_owners(8000, tables=tmp_path) == {1000, 65534}

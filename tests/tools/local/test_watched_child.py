"""A child that fetches or converts: its progress is seen, and it is ended when it stops getting on."""

import os
import shutil
import socket
import subprocess
import sys

import pytest

from pdrelay_tools.local.errors import LocalError
from pdrelay_tools.local.watched_child import ChildLimits, run_watched

pytestmark = pytest.mark.processes

PATIENT = ChildLimits(silence_s=60, most_s=60, most_bytes=1000)


def run(folder, code, limits=PATIENT, report=lambda *_: None):
    run_watched([sys.executable, "-c", code], os.environ, folder, limits, report=report, last_words=str.strip)


def test_a_report_has_the_size_of_the_largest_file(tmp_path):
    """That is the one which grows."""
    sizes = []

    run(tmp_path, f"open({str(tmp_path / 'a')!r}, 'w').write('x' * 300)", report=lambda size, _: sizes.append(size))

    assert sizes[-1] == 300


def test_a_child_that_has_ended_before_it_is_watched_is_reported(tmp_path, monkeypatch):
    """On a busy machine that is so for any that is quick."""

    class Ended(subprocess.Popen):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.wait()

    monkeypatch.setattr(subprocess, "Popen", Ended)
    sizes = []
    run(tmp_path, f"open({str(tmp_path / 'a')!r}, 'w').write('x' * 300)", report=lambda size, _: sizes.append(size))

    assert sizes == [300]


def test_a_folder_that_the_child_removes_meanwhile_is_passed_over(tmp_path, monkeypatch):
    """pip unpacks into one; `pdrelay up` ended with a traceback if it looked just then."""
    (tmp_path / "passing/within").mkdir(parents=True)
    listed = os.scandir

    def list_and_remove(path):
        found = listed(path)
        if path == str(tmp_path):  # rmtree lists by descriptors
            shutil.rmtree(tmp_path / "passing", ignore_errors=True)
        return found

    monkeypatch.setattr(os, "scandir", list_and_remove)
    sizes = []
    run(tmp_path, f"open({str(tmp_path / 'a')!r}, 'w').write('x' * 300)", report=lambda size, _: sizes.append(size))

    assert sizes[-1] == 300


def test_a_failure_has_the_childs_words(tmp_path):
    """An exit code helps nobody, and is all that some leave."""
    with pytest.raises(LocalError, match=r"^no room$"):
        run(tmp_path, "import sys; print('no room'); sys.exit(3)")
    with pytest.raises(LocalError, match=r"^it ended with exit code 3$"):
        run(tmp_path, "import sys; sys.exit(3)")


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        (ChildLimits(silence_s=0, most_s=60, most_bytes=1000), "for 0 s nothing came"),
        (ChildLimits(silence_s=60, most_s=0, most_bytes=1000), "it was not done after 0 s"),
        (ChildLimits(silence_s=60, most_s=60, most_bytes=9), "it wrote more than 9 bytes"),
    ],
)
def test_a_child_that_does_not_get_on_is_ended(tmp_path, limits, says):
    """It would keep `pdrelay up` waiting for ever, or fill the disk."""
    code = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(f'{{os.getpid():>9}} '); time.sleep(600)"
    with pytest.raises(LocalError, match=says):
        run(tmp_path, code, limits)

    if (tmp_path / "pid").exists() and (pid := (tmp_path / "pid").read_text()):
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_a_child_ends_with_the_wait_for_it(tmp_path):
    """Ctrl-C reaches `pdrelay up` alone."""

    def press_ctrl_c(_size, _seconds):
        raise KeyboardInterrupt

    code = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, code, report=press_ctrl_c)

    if (tmp_path / "pid").exists() and (pid := (tmp_path / "pid").read_text()):
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_what_a_child_has_started_ends_with_it(tmp_path):
    """pip asks programs for passwords (keyring), which wait for somebody to type."""
    connections = []

    def press_ctrl_c(_size, _seconds):
        connections.append(server.accept()[0])
        assert connections[0].recv(100) == b"waits\n"
        raise KeyboardInterrupt

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        code = f"""
import socket, subprocess
connection = socket.create_connection({server.getsockname()!r})
subprocess.run(['sh', '-c', 'echo waits; exec sleep 60'], stdout=connection)
"""
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, code, report=press_ctrl_c)

    with connections[0] as connection:
        connection.settimeout(20)
        assert connection.recv(1) == b"", "all that had it open have ended"

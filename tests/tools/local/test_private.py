"""What a run on one machine writes down is for its user alone."""

import os
import stat
import sys

import pytest

from pdrelay_tools.local.plan import LocalPlan
from pdrelay_tools.local.processes import Command, make_directory, open_fleet
from pdrelay_tools.local.up import draw_once, make_home

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def _open_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_logs_are_for_their_user_alone(tmp_path):
    """With any umask, and also when an older run has left them open."""
    home = tmp_path / "home"
    make_directory(home / "logs")
    (home / "logs" / "old.log").touch(mode=0o644)
    with open_fleet(home / "logs") as fleet:
        for name in ("old", "new"):
            child = fleet.start(Command(name, [sys.executable, "-c", "print('a prompt')"], os.environ, "http://x"))
            assert child.wait(30) == 0
            assert mode(child.temp.parent) == 0o700

    assert {path.name: (mode(path), path.read_text()) for path in (home / "logs").iterdir()} == {
        "old.log": (0o600, "a prompt\n"),
        "new.log": (0o600, "a prompt\n"),
    }
    assert (mode(home), mode(home / "logs")) == (0o700, 0o700)


def test_a_folder_that_is_there_stays_as_it_is(tmp_path):
    """It may be a user's home; what is missing below it is made for this user alone."""
    tmp_path.chmod(0o755)
    make_directory(tmp_path / "a" / "b")
    make_directory(tmp_path / "a" / "b")

    assert [mode(path) for path in (tmp_path, tmp_path / "a", tmp_path / "a" / "b")] == [0o755, 0o700, 0o700]


def test_the_folder_of_pdrelay_up_is_closed_also_if_it_was_open(tmp_path):
    """Earlier versions and other tools of a checkout make it with the umask's mode."""
    (home := tmp_path / ".pdrelay").mkdir(mode=0o755)
    (home / "kv-events").mkdir(mode=0o755)
    make_home(LocalPlan(home=home, kv_events=True))

    assert mode(home) == mode(home / "kv-events") == 0o700


def test_a_secret_is_drawn_once_for_this_user_alone(tmp_path):
    """An engine that is added tomorrow reads it, and so does the next fleet of the folder."""
    file = tmp_path / "connector-secret"
    draw_once(file)
    drawn = file.read_text()
    file.chmod(0o644)
    draw_once(file)

    assert file.read_text() == drawn
    assert len(drawn.strip()) >= 32
    assert mode(file) == 0o600

"""What runs here, as far as it can be known."""

import subprocess

import pytest

from pdrelay_proxy.io.build import Build, find_commit

pytestmark = pytest.mark.processes


@pytest.fixture
def package(tmp_path):
    """A package in the folder proxy of a project, as in our repository."""
    folder = tmp_path / "proxy/pdrelay_proxy"
    folder.mkdir(parents=True)
    return folder


def git(folder, *words):
    names = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
    done = subprocess.run(["git", "-C", str(folder), *names, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_checkout_says_its_commit_and_whether_it_was_edited(package):
    """A report from an edited checkout is about something else than the commit."""
    root = package.parents[1]
    (package / "file").write_text("1")
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    commit = git(root, "rev-parse", "HEAD")[:12]

    assert find_commit(package) == commit
    (package / "file").write_text("2")
    assert find_commit(package) == f"{commit}-dirty"


def test_a_wheel_says_the_commit_that_it_was_built_from(package):
    """There is no git where it is installed."""
    (package / "commit.txt").write_text("0123456789ab\n")

    assert find_commit(package) == "0123456789ab"


def test_an_unknown_commit_is_said_to_be_unknown(package):
    """As of a folder that somebody copied."""
    assert find_commit(package) is None
    assert str(Build("0.1.0", None, is_compiled=True)) == "0.1.0 (commit unknown, compiled)"

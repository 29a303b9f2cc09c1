"""A router on a disk that takes nothing more: it serves on, says what it cannot write, and goes on when it can."""

import os
import signal
import sys

import httpx
import pytest
from tests.proxy.test_front_door import front

from support.router_process import KEY
from support.sim import fleet, until
from support.small_disk import HOW, WORDS, small_disk

pytestmark = [pytest.mark.processes, pytest.mark.skipif(sys.platform != "linux", reason="it mounts a tmpfs")]


def order(door, verb, engine):
    body = {"type": "decode", "instance": engine}
    return httpx.post(f"{door.process.url}/instances/{verb}", json=body, headers=KEY, timeout=20)


@pytest.mark.parametrize("how", HOW)
def test_an_engine_that_cannot_be_written_down_is_not_added_and_all_is_served(tmp_path, how):
    """The answer is one sentence and no fault of the engine; the same request is good when there is room."""
    with small_disk(tmp_path) as disk, fleet(0, 1) as (_, _, words):
        path = disk.path / "engines"
        engine = words[-1]
        with front(tmp_path, "--store", f"file:{path}") as door:
            assert door.serves()
            disk.fail(how)
            found = order(door, "add", engine)
            assert found.status_code == 503
            assert f"The instance was not added: {path} cannot be written: {WORDS[how]}" in found.text
            assert door.serves()
            disk.mend(how)
            assert order(door, "add", engine).status_code == 200
            assert door.serves()
            disk.fail(how)
            found = order(door, "remove", engine)
            assert found.status_code == 503
            assert f"The change was not made: {path} cannot be written: {WORDS[how]}" in found.text
            disk.mend(how)
            said = [line for line in door.process.said.splitlines() if "WARNING" in line]
            assert [line.partition(f"{path} ")[2] for line in said] == [f"cannot be written: {WORDS[how]}"], said
            assert "ejected" not in door.process.said


def test_a_worker_that_dies_on_a_full_disk_is_replaced(tmp_path, monkeypatch):
    """What the workers share lies on it."""
    with small_disk(tmp_path) as disk:
        monkeypatch.setenv("TMPDIR", str(disk.path))
        with front(tmp_path, "--workers", "2", "--admin-port", "0") as door:
            until(lambda: "with 2 workers" in door.process.said, seconds=60)
            assert door.serves()
            disk.fail("full")
            pid = int(door.process.said.partition("worker 1 is process ")[2].split()[0])
            os.kill(pid, signal.SIGKILL)
            until(lambda: door.process.said.count("worker 1 is process") == 2, seconds=60)
            assert all(door.serves() for _ in range(20))
            assert "ejected" not in door.process.said

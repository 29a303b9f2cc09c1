"""A router with few descriptors serves as many clients as it says it can, and blames no engine for what it lacks."""

import threading
from contextlib import ExitStack

import pytest
from tests.proxy.test_front_door import JSON, front, request

from support.sim import until

pytestmark = pytest.mark.processes


BODY = b'{"prompt": "once upon a time", "max_tokens": 6}'


def ask(door, found, start):
    """Send three requests on one connection, and note their statuses."""
    with door.open() as client:
        start.wait()
        for _ in range(3):
            found.append(client.send(request(body=BODY, lines=(JSON,))).answer().status)


@pytest.mark.parametrize(("descriptors", "clients"), [(256, 96), (512, 200)])
def test_idle_connections_leave_their_descriptors_to_others(tmp_path, descriptors, clients):
    """Those to the prefill engines took them all, and decode engines could not be reached."""
    with front(tmp_path, soft=descriptors, hard=descriptors, x=1, y=1, token_s=0.2) as door, ExitStack() as stack:
        found = []
        start = threading.Barrier(clients)
        threads = [threading.Thread(target=ask, args=(door, found, start)) for _ in range(clients)]
        for thread in threads:
            thread.start()
            stack.callback(thread.join)
        until(lambda: not any(thread.is_alive() for thread in threads), seconds=120)
        assert found == [200] * 3 * clients
        assert "ejected" not in door.process.said
        assert door.metric("pdrelay_retries_total") == 0

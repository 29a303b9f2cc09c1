"""What operators get from a running router: one id everywhere in its log."""

import json
import logging

import httpx
import pytest

from pdrelay_proxy.io.log_formats import JsonFormatter
from pdrelay_tools.simulated.engine import FaultKind, SimulatedFault
from support.sim import cluster, until

pytestmark = pytest.mark.edges


TEXT = {"prompt": "once upon a time", "max_tokens": 5, "stream": True}
SECRET = "Bearer sk-never-in-a-log"
TRACE = "0af7651916cd43dd8448eb211c80319c"


class Collecting(logging.Handler):
    """Keeps lines of JSON."""

    def __init__(self):
        super().__init__()
        self.setFormatter(JsonFormatter())
        self.lines = []

    def emit(self, record):
        self.lines.append(self.format(record))


@pytest.fixture
def log(caplog):
    handler = Collecting()
    caplog.set_level(logging.INFO, "pdrelay.access")
    logging.getLogger("pdrelay.access").addHandler(handler)
    yield handler.lines
    logging.getLogger("pdrelay.access").removeHandler(handler)


def test_one_id_leads_through_the_log_of_the_router_and_of_both_engines(log):
    """One line for each request, with no address, no key and no prompt in it, also when an engine fails."""
    with cluster(1, 2) as fleet:
        # an engine that has not answered its first probe in time gets no request, and could not fail one
        healthy = 'pdrelay_instance_state{instance="decode-0",role="decode",state="healthy"} 1.0'
        until(lambda: healthy in httpx.get(f"http://{fleet.router}/metrics", timeout=20).text)
        fleet.engines["d0"].inject(SimulatedFault(FaultKind.DROP))
        answers = [
            httpx.post(
                f"http://{fleet.router}/v1/completions", json=TEXT, headers={"authorization": SECRET}, timeout=20
            )
            for _ in range(4)
        ]
        ids = [answer.headers["x-request-id"] for answer in answers]
        ports = [fleet.router.rpartition(":")[2]]

    said = [json.loads(line) for line in log]
    lines = {line["request_id"]: line for line in said if "request_id" in line}
    assert list(lines) == ids
    assert all((line["status"], line["prefill"]) == (200, "prefill-0") for line in lines.values())
    for name in ("p0", "d0", "d1"):
        for entry in fleet.engines[name].log:
            assert entry.headers["x-request-id"].partition("-r")[0] in ids
    about_requests = json.dumps(list(lines.values()))
    assert "retries" in about_requests
    assert not any(secret in about_requests for secret in ("127.0.0.1", "http://", "sk-never", "once upon", *ports))

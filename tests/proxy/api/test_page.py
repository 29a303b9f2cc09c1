"""The status page, its numbers and the metrics, as they are served."""

import base64
import hashlib
import re
import threading
from html.parser import HTMLParser
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import pdrelay_proxy.api.page
from pdrelay_proxy.api.page import content_policy
from pdrelay_proxy.settings import Settings
from pdrelay_tools.simulated.engine import FaultKind, SimulatedFault
from support.sim import router, sims

pytestmark = pytest.mark.edges


HTML = Path(pdrelay_proxy.api.page.__file__).with_name("status.html").read_text(encoding="utf-8")
TEXT = ("/v1/completions", {"prompt": "once upon a time", "max_tokens": 5})


class Reader(HTMLParser):
    """Collects the tags, and sees that each is closed."""

    VOID = frozenset({"meta", "link"})

    def __init__(self, html):
        super().__init__()
        self.tags, self.open = [], []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def of(self, name):
        return [attrs for tag, attrs in self.tags if tag == name]


def test_the_page_is_one_file_that_needs_no_other():
    """Nothing is loaded from anywhere, and nothing is set by attributes that a strict policy forbids."""
    page = Reader(HTML)

    assert not page.open
    assert not [attrs for _, attrs in page.tags if "src" in attrs or "style" in attrs]
    assert all(attrs["href"].startswith("data:") for _, attrs in page.tags if "href" in attrs)
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]
    assert "innerHTML" not in HTML
    assert "url(" not in HTML
    assert "@import" not in HTML


def test_the_page_can_be_read_aloud():
    """Tables have captions and headers, the page has a language, and trouble is announced."""
    page = Reader(HTML)

    assert page.of("html") == [{"lang": "en"}]
    assert len(page.of("caption")) == len(page.of("table")) == 3
    assert all(header.get("scope") for header in page.of("th"))
    assert [attrs["id"] for _, attrs in page.tags if attrs.get("role") == "alert"] == ["trouble"]
    assert any(meta.get("name") == "viewport" for meta in page.of("meta"))


def test_every_id_the_script_asks_for_is_there():
    """And only once."""
    ids = [attrs["id"] for _, attrs in Reader(HTML).tags if "id" in attrs]

    assert set(re.findall(r'\bat\("(\w+)"\)', HTML)) <= set(ids)
    assert len(ids) == len(set(ids))


def test_the_policy_allows_the_pages_own_script_and_style_by_their_hashes():
    """Whatever else gets into the page does not run."""
    policy = dict(part.split(" ", 1) for part in content_policy(HTML).split("; "))

    for tag in ("script", "style"):
        (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", HTML, re.DOTALL)
        expected = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{expected}'"
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in str(policy)


async def test_the_page_and_its_numbers_are_served():
    """No address is in them, and no cache keeps them."""
    async with router(sims(1, 2)) as client:
        await client.post(TEXT[0], json=TEXT[1] | {"stream": True})
        page, numbers = await client.get("/"), await client.get("/stats")

    assert page.text == HTML
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"] == content_policy(HTML)
    assert numbers.headers["cache-control"] == page.headers["cache-control"] == "no-store"
    said = numbers.json()
    assert [one["id"] for one in said["instances"]] == ["prefill-0", "decode-0", "decode-1"]
    assert said["last_minute"]["ttft_s"] > 0
    assert said["last_minute"]["gap_s"] > 0
    assert ":80" not in numbers.text


async def test_failures_are_on_the_page_with_their_reason():
    """A leg that failed and was sent again is no failure of the request, and still worth a look."""
    engines = sims(1, 2)
    engines["d0"].inject(SimulatedFault(FaultKind.STATUS, status=500, body="10.9.8.7 is down"))
    async with router(engines) as client:
        response = await client.post(TEXT[0], json=TEXT[1])
        said = (await client.get("/stats")).json()

    assert response.status_code == 200
    (failure,) = said["failures"]
    assert (failure["where"], failure["reason"]) == ("decode-0", "a leg was answered with 5xx")
    assert failure["request"] == response.headers["x-request-id"][:13] + "..."
    assert said["last_minute"]["failed"] == 0


async def test_no_page_is_served_in_a_thread_beside_the_event_loop():
    """Keys may be replaced on the loop while one is checked; and a process that may have no more threads is scraped."""
    before = set(threading.enumerate())
    pages = ("/", "/stats", "/metrics", "/openapi.json", "/docs", "/instances")
    async with router(sims(), Settings(admin_key="sesame")) as client:
        answers = [await client.get(page, headers={"x-api-key": "sesame"}) for page in pages]
        added = [thread.name for thread in set(threading.enumerate()) - before if "AnyIO" in thread.name]

    assert [answer.status_code for answer in answers] == [200] * len(pages)
    assert added == []


@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_the_metrics_tell_what_became_of_requests(mode):
    """A scrape after a stream, a request for one engine and one for nobody."""
    engines = sims(mode=mode)
    async with router(engines) as client:
        for body in ({"stream": True}, {"stream": True}, {"n": 2}):
            await client.post(TEXT[0], json=TEXT[1] | body)
        engines["p0"].inject(SimulatedFault(FaultKind.STATUS, status=400))
        await client.post(TEXT[0], json=TEXT[1])
        await client.get("/v1/something")
        response = await client.get("/metrics", headers={"accept": "text/plain"})

    seen = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    assert response.headers["content-type"].startswith("text/plain")
    assert seen["pdrelay_requests_total", "/v1/completions", "ok"] == 3
    assert seen["pdrelay_requests_total", "/v1/completions", "client_error"] == 1
    assert seen["pdrelay_requests_total", "client_error", "other"] == 1
    assert seen["pdrelay_requests_routed_total", "n", "single"] == 1
    assert seen["pdrelay_time_to_first_token_seconds_count", "/v1/completions"] == 2
    assert seen["pdrelay_request_duration_seconds_count", "/v1/completions", "ok"] == 3
    assert seen["pdrelay_request_queue_time_seconds_count", "/v1/completions"] == 4
    assert seen["pdrelay_inter_token_latency_seconds_count", "/v1/completions"] >= 2
    assert seen["pdrelay_prefill_seconds_count", "prefill-0"] == 2
    assert seen["pdrelay_decode_ttft_seconds_count", "decode-0"] == 3
    assert seen["pdrelay_legs_total", "decode", "decode-0", "ok"] >= 3
    assert seen["pdrelay_legs_total", "prefill", "prefill-0", "refused"] == 1
    assert seen["pdrelay_instance_state", "healthy", "prefill", "prefill-0"] == 1
    assert seen["pdrelay_handoff_gap_seconds_count",] >= {"pull": 2, "push": 1}[mode]
    assert seen["pdrelay_kv_transfers_total", "decode-0", "unknown"] == 2

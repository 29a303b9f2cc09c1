"""Either half works with what people have: our connector behind a plain router, our router before vLLM's connector."""

import sys

import pytest

from pdrelay_tools.local.processes import Command
from pdrelay_tools.local.recipe import Connector, Role
from support import plain_router
from support.cluster import Watch, base_url, engine_spec, free_ports, port_flags, run_example, start_engine
from support.questions import compare, questions

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def test_our_connector_behind_a_router_that_knows_only_the_wire(fleet, engines, reference_answer):
    """The params are a superset of vLLM's own: whoever carries those carries ours."""
    (port,) = free_ports(1)
    argv = [sys.executable, plain_router.__file__, str(port), engines.p0.base_url, engines.d0.base_url]
    command = Command("plain-router", argv, {}, f"http://127.0.0.1:{port}/health")
    fleet.wait_ready([fleet.start(command)], timeout_s=30)
    asked = questions(20, seed=5)  # what is equal is asked with more in test_equality.py
    with Watch(engines.d0) as decode:
        _, wrong = compare(base_url(command), asked, reference_answer)

    assert wrong == {}
    assert decode.delta("vllm:pdrelay_loads_total") == len(asked)


@pytest.fixture(scope="module")
def asked(reference_answer):
    """Questions whose right answers are known before there are engines that leave the reference no core."""
    asked = questions(10, seed=6)  # of every kind; each of these engines burns a core: 50 took two minutes
    for question in asked:
        reference_answer(question)
    return asked


@pytest.fixture(scope="module")
def stock_pair(fleet, model, asked):
    """vLLM's own NixlConnector on both sides. Each engine burns a core even when idle: stopped as soon as possible."""
    specs = [
        engine_spec("stock-p", model, role=Role.PREFILL, connector=Connector.NIXL),
        engine_spec("stock-d", model, role=Role.DECODE, connector=Connector.NIXL),
    ]
    children = [start_engine(fleet, spec) for spec in specs]
    fleet.wait_ready(children, timeout_s=300)
    yield specs
    fleet.stop(*children)


def test_our_router_before_vllms_own_connector(stock_pair, start_router, asked, reference_answer):
    """The same comparison, and D loaded what P computed (vLLM's connector loads the last token, too)."""
    prefill, decode = stock_pair
    url = start_router("router-stock", [prefill], [decode])
    with Watch(decode) as watch:
        _, wrong = compare(url, asked, reference_answer)
    loaded, cached, computed = (
        watch.delta(f"vllm:prompt_tokens_by_source_total|{source}")
        for source in ("external_kv_transfer", "local_cache_hit", "local_compute")
    )

    assert wrong == {}
    assert loaded + cached == sum(reference_answer(question).prompt_tokens for question in asked)
    assert computed == 0


def test_the_stock_example(stock_pair, model):
    """The example's comparison passes; the engines of the tests stand in for two that it would start the same way."""
    prefill, decode = stock_pair
    addresses = ("--prefill", prefill.address, "--decode", decode.address)
    printed = run_example("04-stock-engines/stock.py", *addresses, *port_flags("--port"), "--model", model)

    assert "prefill by prefill-0, decode by decode-0" in printed

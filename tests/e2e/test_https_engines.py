"""Real engines that serve https, with one name for all, and want a certificate of the router."""

import random
import socket
import ssl
from types import SimpleNamespace

import httpx
import pytest

from pdrelay_tools.local.recipe import Connector, Role
from support.certificates import Authority
from support.cluster import MODEL_NAME, engine_spec, start_engine, values, wait_until
from support.hand_chats import LOADED

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(400),
    pytest.mark.thorough,  # a minute for two engines; who does not fit: tests/proxy/test_https_engines.py
]

NAME = "engines.llm.svc"


def listens(spec):
    """Whether an engine takes connections."""
    with socket.socket() as one:
        return one.connect_ex((spec.host, spec.port)) == 0


@pytest.fixture(scope="module")
def pair(fleet, model, tmp_path_factory):
    """1P1D, and what a client needs to ask them."""
    authority = Authority(tmp_path_factory.mktemp("certificates"), "authority")
    engine, router = authority.sign("engine", f"DNS:{NAME}"), authority.sign("router")
    serving = ("--ssl-certfile", engine.cert, "--ssl-keyfile", engine.key)
    wanting = ("--ssl-ca-certs", authority.own.cert, "--ssl-cert-reqs", str(int(ssl.CERT_REQUIRED)))
    roles = {"p": Role.PREFILL, "d": Role.DECODE}
    specs = {
        name: engine_spec(
            f"https-{name}", model, role=role, connector=Connector.PDRELAY, extra_args=(*serving, *wanting)
        )
        for name, role in roles.items()
    }
    children = [start_engine(fleet, spec) for spec in specs.values()]
    for spec, child in zip(specs.values(), children, strict=True):  # nobody can ask its /health without a certificate
        wait_until(lambda s=spec, c=child: not c.alive or listens(s), seconds=200, what=f"{spec.name} serves")
    trusting = ssl.create_default_context(cafile=authority.own.cert)
    trusting.load_cert_chain(router.cert, router.key)
    at = {name: SimpleNamespace(address=f"https://{spec.address}") for name, spec in specs.items()}
    yield SimpleNamespace(**at, authority=authority, router=router, trusting=trusting)
    fleet.stop(*children)


def loaded(pair):
    """Return the prompt tokens whose KV the decode engine has got from elsewhere."""
    url = f"{pair.d.address}/metrics"
    extensions = {"sni_hostname": NAME}
    with httpx.Client(verify=pair.trusting, trust_env=False) as client:
        text = client.get(url, extensions=extensions, timeout=30).text
    return values(text).get(LOADED, 0.0)


def test_both_legs_of_a_request_go_over_https(pair, start_router, reference):
    trust = ("--engine-ca", pair.authority.own.cert, "--engine-server-name", NAME)
    own = ("--engine-cert", pair.router.cert, "--engine-key", pair.router.key)
    url = start_router("router-https", [pair.p], [pair.d], args=(*trust, *own, "--health-check-interval", "1"))
    prompt = random.Random(7).choices(range(10, 400), k=100)
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 12, "temperature": 0}
    before = loaded(pair)
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)

    right = httpx.post(f"{reference.base_url}/v1/completions", json=body, timeout=120).json()
    assert answer.json()["choices"][0]["text"] == right["choices"][0]["text"]
    assert loaded(pair) - before >= 96  # all blocks of the prompt but the last token's

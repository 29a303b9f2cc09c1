"""What the tests of the router's own HTTP client run on: both event loops, with TLS and without."""

import pytest

from pdrelay_proxy.io.wire.engine_tls import EngineTls
from support.certificates import Authority
from support.wiring import LOOPS


@pytest.fixture(params=LOOPS)
def loop(request):
    return request.param


@pytest.fixture(scope="module")
def serving_tls(tmp_path_factory):
    """What an engine serves with, and what trusts it."""
    serving, trusting = Authority(tmp_path_factory.mktemp("authority"), "ca").contexts()
    return serving, EngineTls(trusting)


@pytest.fixture(params=["http", "https"])
def scheme(request):
    return request.param


@pytest.fixture
def contexts(scheme, serving_tls):
    return serving_tls if scheme == "https" else (None, None)

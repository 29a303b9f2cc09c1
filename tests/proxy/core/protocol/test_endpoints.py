"""Which paths clients can reach."""

from pdrelay_proxy.core.model import Api
from pdrelay_proxy.core.protocol.endpoints import ENDPOINTS, EndpointKind


def test_what_generates_text_is_split_and_nothing_else_is():
    """A path of the wrong kind would lose its answer, or bother two engines with one leg."""
    assert {path for path, kind in ENDPOINTS.items() if kind is EndpointKind.SPLIT} == {api.value for api in Api}


def test_paths_are_whole_and_plain():
    """They are compared as they are: no wildcard could let more through than is meant."""
    assert all(path.startswith("/") and not set(path) & set("{}*?:.") for path in ENDPOINTS)

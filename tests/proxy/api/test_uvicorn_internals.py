"""What the edge uses of uvicorn and httptools beside their documented interfaces.

A release may take any of it away: pyproject.toml has the versions that were tried, and ``make test-bounds`` tries them.
"""

import ast
import asyncio
import inspect
from importlib.metadata import version
from pathlib import Path

import httptools
import pytest
import uvicorn
from uvicorn.protocols.http import flow_control, httptools_impl
from uvicorn.server import ServerState

import pdrelay_proxy.api.guarded
from pdrelay_proxy.api.guarded import ReadControl

PROTOCOL = {
    *("app_state", "client", "config", "connections", "cycle", "flow", "loop", "parser", "server_state", "transport"),
    *("timeout_keep_alive", "timeout_keep_alive_handler", "timeout_keep_alive_task", "_unset_keepalive_if_required"),
    *("connection_made", "connection_lost", "data_received", "pause_writing", "resume_writing"),
    *("on_message_begin", "on_headers_complete", "on_message_complete", "on_response_complete"),
}
FLOW = {"read_paused", "write_paused", "pause_reading", "resume_reading", "_transport"}
CYCLE = {"response_complete", "response_started", "disconnected", "message_event", "waiting_for_100_continue"}
SERVER = {"default_headers", "total_requests"}
CONFIG = {
    *("host", "port", "http", "ws", "log_config", "access_log", "server_header", "ssl_context_factory"),
    *("timeout_keep_alive", "timeout_graceful_shutdown"),
}
MODULE = {"HttpToolsProtocol", "RequestResponseCycle", "STATUS_LINE", "HEADER_VALUE_RE"}
PARSER = {
    *("HttpParserCallbackError", "HttpParserError", "HttpParserInvalidURLError", "HttpParserUpgrade"),
    *("HttpRequestParser", "parse_url"),
}

EDGE = [Path(pdrelay_proxy.api.guarded.__file__).with_name(f"{name}.py") for name in ("guarded", "endpoint_protocol")]


class Transport(asyncio.Transport):
    """Keeps nothing."""

    def is_closing(self):
        return False

    def write(self, data):
        pass

    def close(self):
        pass

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass


@pytest.fixture
async def protocol():
    """uvicorn's own, which serves a request."""

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    config = uvicorn.Config(app, http="httptools", ws="none", log_config=None)
    config.load()
    found = config.http_protocol_class(config=config, server_state=ServerState(), app_state={})
    found.connection_made(Transport())
    found.data_received(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    yield found
    await asyncio.gather(*found.server_state.tasks)
    found.connection_lost(None)


def check(owner, thing, names):
    """Say which of the names are missing."""
    missing = sorted(name for name in names if not hasattr(thing, name))
    said = f"uvicorn {version('uvicorn')} with httptools {version('httptools')}"
    assert not missing, f"{said} has no {owner}.{{{', '.join(missing)}}}, which proxy/pdrelay_proxy/api uses"


async def test_what_the_edge_uses_is_there(protocol):
    """One sentence says what is missing."""
    check("HttpToolsProtocol", protocol, PROTOCOL)
    check("FlowControl", protocol.flow, FLOW)
    check("RequestResponseCycle", protocol.cycle, CYCLE)
    check("ServerState", protocol.server_state, SERVER)
    check("httptools_impl", httptools_impl, MODULE)
    check("flow_control", flow_control, {"FlowControl", "HIGH_WATER_LIMIT"})
    check("httptools", httptools, PARSER)
    missing = CONFIG - inspect.signature(uvicorn.Config).parameters.keys()
    assert not missing, f"uvicorn {version('uvicorn')} takes no {missing}, which proxy/pdrelay_proxy/listeners.py gives"


async def test_a_missing_name_is_told_in_a_sentence(protocol):
    """It names the version and the place."""
    with pytest.raises(AssertionError, match=r"uvicorn [0-9.]+ with .* has no FlowControl.{gone}, which .* uses"):
        check("FlowControl", protocol.flow, {"gone", "read_paused"})


async def test_reading_is_controlled_in_the_same_way(protocol):
    """What the edge replaces has no method or field that its own has not."""
    own = ReadControl(Transport())

    assert vars(protocol.flow).keys() <= vars(own).keys()
    assert isinstance(own, type(protocol.flow))


def test_the_lists_are_complete():
    """What the edge's classes use of themselves is their own, or is in a list above."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in EDGE]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef)} - PROTOCOL - FLOW
    own |= {node.target.id for node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    own |= {
        name.id for node in nodes if isinstance(node, ast.Assign) for name in node.targets if isinstance(name, ast.Name)
    }
    used = {
        (".".join(ast.unparse(node.value).split(".")[:2]), node.attr)
        for node in nodes
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in OWNERS
    }

    assert {(owner, name) for owner, name in used if name not in OWNERS[owner] and name not in own} == set()


OWNERS = {
    "self": PROTOCOL | FLOW,
    "super()": PROTOCOL,
    "self.flow": FLOW,
    "cycle": CYCLE,
    "self.cycle": CYCLE,
    "self.server_state": SERVER,
    "httptools": PARSER,
}

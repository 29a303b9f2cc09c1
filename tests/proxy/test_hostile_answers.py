"""Engines that answer with what must not reach a client."""

import json
from contextlib import ExitStack
from dataclasses import dataclass

import httpx
import pytest

from support.raw_engine import raw_engine
from support.router_process import router_processes
from support.sim import serving, sims

pytestmark = pytest.mark.processes


PARAMS = {"remote_host": "10.0.0.1", "remote_port": 5600, "remote_block_ids": [[1, 2]]}
PATHS = {
    "/v1/completions": {"prompt": "a", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4},
    "/v1/responses": {"input": "a", "max_output_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "model": "sim"},
    "/v1/embeddings": {"input": "a"},
}


@dataclass
class Stage:
    """A decode engine that says what a test puts here, and the router in front of it."""

    says: bytes = b""
    url: str = ""

    def post(self, path, **more):
        body = PATHS[path] | more
        return httpx.post(self.url + path, json=body, timeout=30)

    def script(self, engine, talk):
        talk.request()
        talk.send(self.says)
        while b"content-length: " in self.says or b"chunked" in self.says:  # else its end is that of the connection
            talk.request()
            talk.send(self.says)


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    """A router that asks nobody else."""
    stage = Stage()
    with ExitStack() as stack:
        prefill = stack.enter_context(serving(sims()["p0"]))
        decode = stack.enter_context(raw_engine(stage.script)).at
        args = ("--prefill", prefill, "--decode", decode, "--health-check-interval", "0", "--retries", "0")
        args += ("--circuit-breaker-failures", "0")
        (router,) = stack.enter_context(router_processes(tmp_path_factory.mktemp("router"), 1, *args))
        stage.url = router.url
        yield stage


def whole(body, content_type=b"application/json", status=200):
    head = b"HTTP/1.1 %d X\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
    return head % (status, content_type, len(body)) + body


def stream(*chunks):
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"


@pytest.mark.parametrize("version", [b"HTTP/1.0", b"HTTP/1.1"])
@pytest.mark.parametrize("path", PATHS)
def test_half_an_answer_that_ends_with_its_connection_is_none(stage, path, version):
    """An engine that dies ends its connections, too; only JSON shows what is missing."""
    text = json.dumps({"id": "x", "choices": [{"text": "a", "finish_reason": "stop"}], "stop_reason": "stop"}).encode()
    statuses = []
    for size in (0, 1, len(text) // 2, len(text) - 1, len(text)):
        stage.says = version + b" 200 OK\r\ncontent-type: application/json\r\n\r\n" + text[:size]
        statuses.append(stage.post(path).status_code)

    assert statuses == [502, 502, 502, 502, 200]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("where", ["top", "choice", "escaped"])
def test_parameters_of_the_transfer_never_reach_a_client(stage, path, where):
    """They say where an engine's memory is, and how to read it."""
    said = {"id": "x", "temperature": 0.1, "prompt_token_ids": [1], "choices": [{"text": "kv_transfer_params"}]}
    if where == "choice":
        said["choices"][0]["kv_transfer_params"] = PARAMS
    else:
        said["kv_transfer_params"] = PARAMS
    text = json.dumps(said).encode()
    if where == "escaped":
        text = text.replace(b'"kv_transfer_params": {', b'"kv\\u005ftransfer_params": {')
    stage.says = whole(text)

    answer = stage.post(path)

    assert answer.status_code == 200
    assert answer.json() == {
        "id": "x",
        "temperature": 0.1,
        "prompt_token_ids": [1],
        "choices": [{"text": "kv_transfer_params"}],
    }
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", [path for path in PATHS if path != "/v1/embeddings"])
def test_nor_with_the_last_event_of_a_stream(stage, path):
    """There they are in vLLM 0.33; whatever the network makes of the line."""
    last = {"/v1/responses": b"response.completed", "/v1/messages": b"message_stop"}.get(path)
    said = {"id": "x", "response": {"kv_transfer_params": PARAMS}, "kv_transfer_params": PARAMS}
    data = json.dumps(said, separators=(",", ":")).encode()  # as vLLM writes it
    event = (b"event: %b\n" % last if last else b"") + b"data: " + data + b"\n\n"
    done = b"" if last else b"data: [DONE]\n\n"
    at = event.index(b"transfer")
    stage.says = stream(b'data: {"choices":[{"text":"a"}]}\n\n', event[:at], event[at:], done or b": bye\n\n")

    answer = stage.post(path, stream=True)

    assert answer.status_code == 200
    assert "kv_transfer_params" not in answer.text
    assert "10.0.0.1" not in answer.text
    assert '{"id":"x","response":{}}' in answer.text
    assert "error" not in answer.text


@pytest.mark.parametrize("status", [200, 400])
@pytest.mark.parametrize("content_type", [b"text/html", b"image/svg+xml", b"application/json, text/html"])
def test_other_content_types_do_not_reach_a_browser(stage, status, content_type):
    """A page of an engine's would run as one of the router's."""
    stage.says = whole(b"<script>alert(1)</script>", content_type, status)

    answer = stage.post("/v1/completions")

    assert answer.status_code == (502 if status == 200 else status)
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "<script>" not in answer.text
    if status == 200:
        assert "decode-0 answered with the content type" in answer.json()["error"]["message"]


@pytest.mark.parametrize("status", [600, 999])
@pytest.mark.parametrize("path", PATHS)
def test_a_status_that_no_answer_can_have_is_the_engines_failure(stage, path, status):
    """RFC 9110, 15: those from 600 on are none. The client has to have an answer all the same."""
    stage.says = whole(b'{"error":{"message":"no"}}', status=status)

    answer = stage.post(path)

    assert answer.status_code == 502


def test_an_error_keeps_its_words_and_not_its_type(stage):
    """The body is JSON, so it is declared as that."""
    stage.says = whole(b'{"error":{"message":"no <b>","kv_transfer_params":{"a":1}}}', b"text/html", 400)

    answer = stage.post("/v1/completions")

    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"
    assert answer.text == '{"error":{"message":"no <b>"}}'

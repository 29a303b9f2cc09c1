"""A client's body: what is read of it, and what is refused."""

import json

import pytest

from pdrelay_proxy.core.model import Api
from pdrelay_proxy.core.protocol.client_body import check_wanted_now, parse
from pdrelay_proxy.core.raw_json import encode
from pdrelay_proxy.errors import BadRequest


@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]
)
def test_a_body_may_have_every_encoding_that_vllm_reads(encoding):
    """Windows' clients write a mark before it, or UTF-16; what only the router may set is found in each."""
    body = '{"prompt": "größe 😀", "n": 1}'.encode(encoding)

    assert json.loads(encode(parse(body))) == {"prompt": "größe 😀", "n": 1}
    private = '{"prompt": "ö", "kv_transfer_params": {"a": 1}}'.encode(encoding)
    with pytest.raises(BadRequest, match="set by the router"):
        parse(private)
    with pytest.raises(BadRequest, match="at most"):
        parse(json.dumps({str(number): 1 for number in range(5000)}).encode(encoding))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not JSON"),
        (b"\xef\xbb\xbf", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'\xff\xfe{\x00"\x00', "not JSON"),
        (b'\xff\xfe"\x00\x00\xd8"\x00', "not JSON"),
        ("[1]".encode("utf-16"), "JSON, but not an object"),
        (b'{"a": "\xe9"}', "not JSON"),
        (b"hello", "not JSON"),
        (b'{"prompt":"hi"', "not JSON"),
        (b"[" * 100_000, "not"),
        (b"[1]", "JSON, but not an object"),
        (b"null", "JSON, but not an object"),
    ],
)
def test_a_body_that_is_no_object_is_the_clients_mistake(body, says):
    """400, with the reason."""
    with pytest.raises(BadRequest, match=says):
        parse(body)


@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params"])
@pytest.mark.parametrize("value", [{"do_remote_prefill": True}, {}, 7, "x"])
def test_clients_may_not_send_transfer_parameters(name, value):
    """They name other requests' memory, and {"do_remote_prefill": true} alone kills a vLLM 0.32 engine."""
    for body, where in (
        ({name: value}, name),
        ({"vllm_xargs": {name: value}}, f"vllm_xargs.{name}"),
        ({"sampling_params": {"extra_args": {name: value}}}, f"sampling_params.extra_args.{name}"),
    ):
        with pytest.raises(BadRequest, match=f"{where} is set by the router") as caught:
            parse(json.dumps({"prompt": "hi"} | body).encode())
        assert caught.value.param == where


def test_an_escaped_name_is_the_same_name():
    """Or a backslash would be enough to reach the engine."""
    with pytest.raises(BadRequest, match="kv_transfer_params"):
        parse(rb'{"prompt":"hi","kv_\u0074ransfer_params":{}}')
    with pytest.raises(BadRequest, match="kv_transfer_params"):
        parse(rb'{"prompt":"hi","vllm_xargs":{"kv_\u0074ransfer_params":1}}')
    with pytest.raises(BadRequest, match="kv_transfer_params"):
        parse(rb'{"sampling_params":{"extra_\u0061rgs":{"kv_\u0074ransfer_params":1}}}')


def test_null_says_nothing_and_is_dropped():
    """Some clients write out every field they know."""
    fields = parse(b'{"prompt":"hi","kv_transfer_params":null,"vllm_xargs":null}')

    assert encode(fields) == b'{"prompt":"hi","vllm_xargs":null}'


def test_clients_cannot_have_an_engine_repeat_its_kv_events():
    """``full`` tells all routers again of every cached block, with each request; the answer is the same without it."""
    body = (
        b'{"vllm_xargs":{"kv_cache_report_mode":"full","a":0.10},'
        b'"sampling_params":{"extra_args":{"kv_cache_report_mode":"full"},"n":1}}'
    )
    fields = parse(body)

    assert encode(fields) == b'{"vllm_xargs":{"a":0.10},"sampling_params":{"extra_args":{},"n":1}}'


def test_of_two_extra_arguments_the_one_that_was_looked_at_goes_on():
    """Or an engine could read the other one."""
    body = b'{"sampling_params":{"extra_args":{"kv_transfer_params":1},"seed" : 1e1,"extra_args":{"a":1}}}'

    assert encode(parse(body)) == b'{"sampling_params":{"extra_args":{"a":1},"seed":1e1}}'


@pytest.mark.parametrize("extra", [b'{"a" : 1}', b"[1]", b'"x"'])
def test_other_extra_arguments_are_left_alone(extra):
    """Also those the engine will refuse."""
    assert bytes(parse(b'{"vllm_xargs":' + extra + b"}")["vllm_xargs"]) == extra


def test_extra_arguments_that_cannot_be_read_are_refused():
    """What is in them cannot be told."""
    with pytest.raises(BadRequest, match="is not JSON"):
        parse(b'{"vllm_xargs":{"\xff":1}}')


@pytest.mark.parametrize("value", [True, 1, "yes", {}])
def test_an_answer_for_later_is_refused(value):
    """However it is spelt; elsewhere the field means nothing."""
    fields = parse(json.dumps({"background": value}).encode())
    with pytest.raises(BadRequest, match="background"):
        check_wanted_now(Api.RESPONSES, fields)

    check_wanted_now(Api.CHAT, fields)
    for no in (b'{"background":false}', b'{"background":null}', b"{}"):
        check_wanted_now(Api.RESPONSES, parse(no))

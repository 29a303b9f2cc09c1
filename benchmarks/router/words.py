"""What clients ask and what null engines answer: bytes that both sides can compute without looking
at each other.

A prompt is a mark with its number and length, and then as much of one fixed text as it takes. So an
engine finds a prompt, checks every byte of it and leaves it out of what it parses, all at the speed
of memory.
"""

import functools
from typing import NamedTuple

import msgspec

MODEL = "bench"
MARK = b"#bench-"
MARKED = len(MARK) + len(b"00000000-000000 ")
CREATED = 1700000000  # seconds since the epoch, in every answer
MOST = 10_000  # tokens of an answer
LONGEST = 0xFFFFFF  # bytes of a prompt

# escaped, as it is inside JSON
_LINE = b" ".join(b"word%03d" % (37 * n % 1000) for n in range(11)) + rb".\n"
_PLACES = [b"%04d" % n for n in range(MOST)]
_ROLE = b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
_IDS = b'"prompt":['
_PATHS = {False: b"/v1/completions", True: b"/v1/chat/completions"}


class Kv(msgspec.Struct):
    """What a null engine reads in kv_transfer_params."""

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_request_id: str | None = None
    remote_block_ids: list | None = None
    transfer_mode: str | None = None
    transfer_id: str | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class Fields(msgspec.Struct):
    """What a null engine reads beside the prompt."""

    model: str = ""
    max_tokens: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    kv_transfer_params: Kv | None = None
    return_token_ids: bool | None = None


class Asked(NamedTuple):
    """A request as an engine got it."""

    number: int
    size: int  # bytes of the prompt
    fields: Fields


class Corrupt(ValueError):
    """A request is not as a client has sent it."""


@functools.lru_cache(maxsize=64)
def filler(size):
    """Return so many bytes of text, with escapes as in JSON but never half of one."""
    text = (_LINE * (size // len(_LINE) + 1))[:size]
    return text[:-1] + b"x" if text.endswith(b"\\") else text


@functools.lru_cache(maxsize=64)
def _around(path, host, size, tokens, chat, stream):
    """Return what is before and after the prompt in a whole HTTP request."""
    head, tail = (
        (b'"messages":[{"role":"user","content":"', b'"}]') if chat else (b'"prompt":"', b'"')
    )
    head = b'{"model":"%b",%b' % (MODEL.encode(), head)
    tail += b',"max_tokens":%d,"temperature":0.0' % tokens
    tail += (
        b',"stream":true,"stream_options":{"include_usage":true}}'
        if stream
        else b',"stream":false}'
    )
    length = len(head) + size + len(tail)
    lines = (
        b"POST %b HTTP/1.1" % path,
        b"host: %b" % host,
        b"accept: */*",
        b"authorization: Bearer sk-bench",
        b"content-type: application/json",
        b"content-length: %d" % length,
    )
    return b"\r\n".join(lines) + b"\r\n\r\n" + head, tail


def request(number, *, host, size, tokens, chat, stream):
    """Return an HTTP request, in pieces: a long prompt is not copied."""
    before, after = _around(_PATHS[chat], host, size, tokens, chat, stream)
    return b"%b%b%08x-%06x " % (before, MARK, number, size), filler(size - MARKED), after


def read(body):
    """Return what a body asks for.

    Raises:
        Corrupt: its prompt is not the one that was sent, or the rest is no JSON.
    """
    start = body.find(MARK)
    if start < 0:
        return _read_ids(body)
    try:
        number, size = int(body[start + 7 : start + 15], 16), int(body[start + 16 : start + 22], 16)
        text, end = start + MARKED, start + size
        if (
            start < 0
            or not body.startswith(filler(size - MARKED), text)
            or body[end : end + 1] != b'"'
        ):
            raise Corrupt("the prompt is not the one that was sent")
        return Asked(number, size, _decode(body[:start] + body[end:]))
    except (ValueError, msgspec.MsgspecError) as exc:
        raise Corrupt(f"not a request: {exc}") from exc


_decode = msgspec.json.Decoder(Fields).decode


def prompt_ids(number, size):
    """Return the JSON of a prompt's token ids, of four bytes of text each; its number and size are
    the first two.
    """
    return b"[%d,%d,%b" % (number, size, _more_ids(size // 4 - 2))


@functools.lru_cache(maxsize=64)
def _more_ids(count):
    return b",".join(b"%d" % (37 * n % 30_000) for n in range(count)) + b"]"


def _read_ids(body):
    """Return what a body asks for whose prompt was replaced by its ids."""
    start = body.find(_IDS)
    try:
        number, size = (int(each) for each in body[start + len(_IDS) : start + 40].split(b",")[:2])
        if start < 0 or not body.startswith(prompt_ids(number, size), start + len(_IDS) - 1):
            raise Corrupt("the ids of the prompt are not those that were told")
        return Asked(number, size, _decode(body))
    except (ValueError, msgspec.MsgspecError) as exc:
        raise Corrupt(f"not a request: {exc}") from exc


def is_release(body):
    """Tell a request for more tokens than an engine has room for, which only makes a prefill engine
    free its blocks.
    """
    if MARK in body:
        return False
    try:
        fields = _decode(body)
    except (ValueError, msgspec.MsgspecError):
        return False
    return (fields.max_tokens or 0) > LONGEST and fields.kv_transfer_params is not None


class Stream(NamedTuple):
    """A streamed answer: what goes before the tokens, an event for each token, what goes after
    them.
    """

    first: bytes
    tokens: list
    end: bytes

    def whole(self):
        return b"".join((self.first, *self.tokens, self.end))


def stream(number, tokens, *, chat, usage=True, size=0):
    """Return a streamed answer, in vLLM's shape."""
    if chat:
        head = (
            b'data: {"id":"chatcmpl-%08x","object":"chat.completion.chunk","created":%d,"model":"%b","choices":['
            % (
                number,
                CREATED,
                MODEL.encode(),
            )
        )
        first = head + _ROLE
        before = b'%b{"index":0,"delta":{"content":" %08x' % (head, number)
        after, last = b'"},"logprobs":null,"finish_reason":', b',"token_ids":null}]}\n\n'
    else:
        head = (
            b"data: "
            b'{"id":"cmpl-%08x","object":"text_completion","created":%d,"model":"%b","choices":['
            % (
                number,
                CREATED,
                MODEL.encode(),
            )
        )
        first = b""
        before = b'%b{"index":0,"text":" %08x' % (head, number)
        after, last = (
            b'","logprobs":null,"finish_reason":',
            b',"stop_reason":null,"token_ids":null}],"usage":null}\n\n',
        )
    close = after + b"null" + last
    events = [before + place + close for place in _PLACES[: tokens - 1]]
    events.append(before + _PLACES[tokens - 1] + after + b'"length"' + last)
    told = b'%b],"usage":%b}\n\n' % (head, _usage(size, tokens)) if usage else b""
    return Stream(first, events, told + b"data: [DONE]\n\n")


def event_size(*, chat):
    """Return the bytes of every event of a token, but of the last, which is a little longer."""
    return len(stream(0, 2, chat=chat).tokens[0])


def whole(number, tokens, *, chat, size=0, kv=b"null", ids=False):
    """Return an answer in one piece, in vLLM's shape; ``ids``: with those of its prompt."""
    text = b"".join(b" %08x%b" % (number, place) for place in _PLACES[:tokens])
    if chat:
        name, kind = b"chatcmpl", b"chat.completion"
        said = b'"message":{"role":"assistant","content":"%b"}' % text
        inside = b""
        beside = b',"prompt_token_ids":%b' % prompt_ids(number, size) if ids else b""
    else:
        name = b"cmpl"
        kind = b"text_completion"
        said = b'"text":"%b"' % text
        inside = b',"prompt_token_ids":%b' % prompt_ids(number, size) if ids else b""
        beside = b""
    return (
        b'{"id":"%b-%08x","object":"%b","created":%d,"model":"%b","choices":[{"index":0,%b,"logprobs":null,'
        b'"finish_reason":"length","stop_reason":null%b}]%b,"usage":%b,"kv_transfer_params":%b}'
    ) % (
        name,
        number,
        kind,
        CREATED,
        MODEL.encode(),
        said,
        inside,
        beside,
        _usage(size, tokens),
        kv,
    )


def _usage(size, tokens):
    asked = size // 4
    return b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}' % (
        asked,
        tokens,
        asked + tokens,
    )


@functools.lru_cache(maxsize=64)
def _blocks(size):
    """Return the ids of the blocks of a prompt, with 4 bytes a token and 16 tokens a block."""
    return b"[[%b]]" % b",".join(b"%d" % n for n in range(1, size // 64 + 2))


def kv_params(number, size, name, engine, *, push):
    """Return what a prefill engine says about the blocks of a request, which both engines call
    ``name``.
    """
    return (
        b'{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":%b,"remote_engine_id":"%b",'
        b'"remote_request_id":"%b-%08x","remote_host":"127.0.0.1","remote_port":5600,"tp_size":1,"dcp_size":1,'
        b'"pp_size":1,"remote_num_tokens":%d,"remote_blocks_expiry_time":null,"transfer_mode":"%b",'
        b'"remote_prefill_cached_tokens":0}'
    ) % (_blocks(size), engine, name, number, size // 4, b"push" if push else b"pull")


def is_told(kv, number, *, name):
    """Tell whether a decode engine knows where the blocks of this very request are."""
    if not kv.do_remote_prefill or not kv.remote_request_id:
        return False
    if kv.remote_request_id.endswith(f"-{number:08x}"):
        return bool(kv.remote_block_ids)
    return (
        kv.transfer_mode == "push"
        and bool(kv.transfer_id)
        and kv.remote_request_id.startswith(name)
    )

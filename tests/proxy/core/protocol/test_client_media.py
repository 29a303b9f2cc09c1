"""Which images, audio and videos a client may name."""

import json
from functools import partial

import pytest

from pdrelay_proxy.core.protocol.client_body import parse
from pdrelay_proxy.core.protocol.client_media import check_media
from pdrelay_proxy.errors import BadRequest
from support.line_count import lines

URL = "http://metadata.internal/latest"
DATA = "data:image/png;base64,QUJD"


def check(fields, hosts=(), text=None, *, may_have_ids=True):
    hosts = None if hosts is None else frozenset(hosts)
    read = parse((text or json.dumps(fields)).encode())
    check_media(read, hosts, may_have_ids=may_have_ids)


def chat(part):
    return [{"role": "user", "content": [{"type": "text", "text": "look"}, part]}]


def requests_with(url):
    """Each place of a request in which vLLM reads the URL of a medium."""
    image = {"type": "image_url", "image_url": {"url": url}}
    source = {"type": "image", "source": {"type": "url", "url": url}}
    return {
        "image": {"messages": chat(image)},
        "image, plain": {"messages": chat({"image_url": url})},
        "image with an id": {"messages": chat({"type": "image_url", "image_url": {"url": url}, "uuid": "1"})},
        "audio": {"messages": chat({"type": "audio_url", "audio_url": {"url": url}})},
        "video": {"messages": chat({"type": "video_url", "video_url": {"url": url}})},
        "batch": {"messages": [chat({"type": "text", "text": "a"}), chat(image)]},
        "responses": {"input": chat({"type": "input_image", "image_url": url})},
        "file of responses": {"input": chat({"type": "input_file", "file_url": url})},
        "output of a function": {
            "input": [{"type": "function_call_output", "output": [{"type": "input_image", "image_url": url}]}]
        },
        "messages": {"messages": chat(source)},
        "result of a tool": {"messages": chat({"type": "tool_result", "content": [source]})},
        "generate": {"token_ids": [1], "content_parts": [{"type": "video_url", "url": url}]},
        "embed": {"inputs": [{"content": [image]}]},
        "images of embed": {"images": [DATA, url]},
        "audio of a decision": {"state": "s", "audio": [url]},
        "videos of a decision": {"state": "s", "videos": [DATA, url]},
        "score": {"text_1": "a", "data_2": {"content": [image]}},
        "rerank": {"query": {"content": [image]}, "documents": ["a"]},
    }


@pytest.mark.parametrize("place", requests_with(URL))
def test_a_url_is_found_wherever_vllm_reads_one(place):
    """Engines are inside the closed network, and follow redirects."""
    with pytest.raises(BadRequest, match=r"from metadata\.internal: .*data: URL.*allowed_media_domains"):
        check(requests_with(URL)[place])

    check(requests_with(URL)[place], hosts=["metadata.internal"])
    check(requests_with(DATA)[place])


def test_escapes_hide_no_name_and_no_scheme():
    """JSON has two ways to write each letter, and Python's parser reads both."""
    text = json.dumps({"messages": chat({"type": "image_url", "image_url": {"url": URL}})})
    escaped = text.replace("image_url", "im\\u0061ge\\u005furl").replace('"url"', '"\\u0075rl"')

    with pytest.raises(BadRequest, match="metadata"):
        check(None, text=escaped.replace("http:", "\\u0068ttp:"))
    with pytest.raises(BadRequest, match="metadata"):
        check(None, text=text.replace('"image_url": {', '"image_url": {"url": "data:,", '))


@pytest.mark.parametrize(
    "url",
    [
        "http://good.example@evil.example/a",
        "http://evil.example\\@good.example/a",
        "http://good.example:80@evil.example/a",
        "http://good.example /a",
        "//good.example/a",
        "file:///etc/passwd",
        "ftp://good.example/a",
        " http://good.example/a",
        "https:/good.example",
    ],
)
def test_what_readers_could_understand_differently_is_refused(url):
    """The host that is checked is the one that is asked."""
    with pytest.raises(BadRequest, match="is not a URL that engines may fetch"):
        check(requests_with(url)["image"], hosts=["good.example"])


@pytest.mark.parametrize("url", ["HTTPS://Good.Example/a?b#c", "http://good.example:8080/a", "http://[::1]/"])
def test_hosts_are_compared_as_names_are(url):
    """Ports are the business of whoever allows a host."""
    check(requests_with(url)["image"], hosts=["good.example", "::1"])


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": f'say "image_url": "{URL}" [1]'}]},
        {"messages": chat({"type": "text", "text": URL})},
        {"messages": chat({"type": "image_url", "image_url": None, "uuid": "1"})},
        {"messages": chat({"type": "tool_result", "content": [{"type": "web_search_result", "url": URL}]})},
        {"messages": chat({"type": "tool_use", "input": {"image_url": URL}})},
        {"messages": [], "tools": [{"parameters": {"properties": {"image_url": {"type": "string", "url": URL}}}}]},
        {"prompt": URL, "metadata": {"image_url": URL}},
        {"images": 3},
        {"input": [[1, 2], [3]]},
    ],
)
def test_what_no_engine_fetches_is_not_looked_at(fields):
    """Texts, calls of tools and what vLLM refuses by itself."""
    check(fields)


@pytest.mark.parametrize("depth", range(900, 1010))
def test_no_depth_hides_a_url(depth):
    """What the whole body's reader takes, the reader of a part may find nested too deeply."""
    part = f'{{"type":"image_url","image_url":{{"url":"{URL}"}},"x":{"[" * depth}{"]" * depth}}}'

    with pytest.raises(BadRequest):
        check(None, text=f'{{"messages":[{{"role":"user","content":[{part}]}}]}}')


def test_a_message_without_end_is_refused():
    """What lies deeper than the check looks would not be checked."""
    part = {"image_url": URL}
    for _ in range(40):
        part = {"content": [part]}

    with pytest.raises(BadRequest, match="levels deep"):
        check({"messages": [part]})


NAMED = {
    "chat": {"messages": chat({"type": "image_url", "image_url": {"url": DATA}, "uuid": "x"})},
    "of another request": {"messages": chat({"type": "image_url", "image_url": None, "uuid": "x"})},
    "embeddings": {"messages": chat({"type": "image_embeds", "image_embeds": None, "uuid": "x"})},
    "responses": {"input": chat({"type": "input_image", "image_url": DATA, "uuid": "x"})},
    "generate": {"token_ids": [1], "content_parts": [{"type": "image_url", "url": DATA, "uuid": "x"}]},
    "features": {"token_ids": [1], "features": {"mm_hashes": {"image": ["x"]}, "kwargs_data": {"image": [None]}}},
    "score": {"text_1": "a", "data_2": {"content": [{"type": "image_url", "image_url": {"url": DATA}, "uuid": "x"}]}},
}


@pytest.mark.parametrize("place", NAMED)
def test_a_client_cannot_name_a_medium_in_the_cache_of_all(place):
    """vLLM would answer about the image that another client has sent under that id, or keep ours in its place."""
    with pytest.raises(BadRequest, match="names media in a cache that all clients of the engines share"):
        check(NAMED[place], hosts=None, may_have_ids=False)

    check(NAMED[place], hosts=None)


def test_an_id_that_says_nothing_is_none():
    """And other ids are not media's."""
    check(
        {"messages": chat({"type": "image_url", "image_url": {"url": DATA}, "uuid": None}), "uuid": "x"},
        may_have_ids=False,
    )


@pytest.mark.parametrize("part", [b'{"uuid":0}', b'{"url":"x"}', b'[{"url":"x"}]'])
def test_the_shortest_parts_are_looked_at(part):
    """Among thousands that are too short to name a medium."""
    fields = parse(b'{"messages":[{"content":[%b%b]}]}' % (b"{},[]," * 1000, part))

    with pytest.raises(BadRequest):
        check_media(fields, frozenset(), may_have_ids=False)


@pytest.mark.parametrize("part", [b"{}", b"[]", b"[1,2]"])
def test_parts_that_can_name_no_medium_cost_next_to_nothing(part):
    """As much as numbers. Each was parsed: 250 KB of them, which are read on the event loop, took 50 ms."""
    bodies = [b'{"messages":[{"content":[%b{"url":"data:"}]}]}' % ((each + b",") * 1000) for each in (part, b"0")]
    looked_at, numbers = (lines(partial(check_media, parse(body), frozenset(), may_have_ids=False)) for body in bodies)

    assert looked_at == numbers

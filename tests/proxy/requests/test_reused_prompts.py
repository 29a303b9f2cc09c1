"""Only the prefill engine tokenizes: the decode engine gets ids where it can take them, and the text of one engine."""

import json

import pytest

from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.model import Api, EngineResponse, Role
from pdrelay_proxy.core.protocol.prompt_ids import LONGEST_PROMPT
from pdrelay_proxy.errors import EngineError
from support.greedy import events, first_answer, ids_of, read
from support.scripted import JSON, Scripted, call, prefilled, request_id, router_of

TEXT = {"stream": True, "temperature": 0, "max_tokens": 8, "prompt": "once"}
CHAT = {"stream": True, "temperature": 0, "max_tokens": 8, "messages": [{"role": "user", "content": "go on"}]}
BODIES = {Api.COMPLETIONS: TEXT, Api.CHAT: CHAT}
APIS = pytest.mark.parametrize("api", BODIES)


class Engines(Scripted):
    """Engines of one model; decode engines on ``dead`` ports cannot be reached."""

    def __init__(self, *, mode="pull", spoil=lambda _: None, dead=()):
        super().__init__(self._prefill, self._decode)
        self._mode = mode
        self._spoil = spoil
        self._dead = dead

    async def _prefill(self, leg):
        answer = first_answer(json.loads(leg.body), name=f"cmpl-{request_id(leg)}")
        self._spoil(answer)
        params = json.loads(prefilled(leg, transfer_mode=self._mode).body)
        written = json.dumps(answer | {"kv_transfer_params": params["kv_transfer_params"]}, separators=(",", ":"))
        return EngineResponse(200, JSON, written.encode())

    async def _decode(self, leg):
        if leg.instance.address.port in self._dead:
            raise EngineError("nobody listens there", reached=False)
        return 200, list(events(json.loads(leg.body), name=f"cmpl-{request_id(leg)}"))

    def asked(self, role):
        return [json.loads(leg.body) for leg in self.of(role)]


def knowing(engines, *versions, **options):
    """A router that knows the versions of its decode engines."""
    router = router_of(engines, y=len(versions), **options)
    decodes = [member.instance for member in router.registry.members() if member.instance.role is Role.DECODE]
    for decode, version in zip(decodes, versions, strict=True):
        router.registry.learn(decode.id, EngineCapabilities(version=version))
    return router


async def served(engines, api, body, *versions, **options):
    """Serve a request; the client has the text of one engine, and nothing is held."""
    router = knowing(engines, *versions, **options)
    client = await router.serve(call(api, **body))
    assert read(client.body) == read(b"".join(events(body, name="cmpl-r")))
    assert not engines.open
    assert router.is_idle()
    return client


def has_ids(asked):
    """Tell whether a decode engine was asked by ids; the rest must be the client's in any case."""
    body = TEXT if "prompt" in asked else CHAT
    assert {name: asked[name] for name in body if name != "prompt"} == {n: v for n, v in body.items() if n != "prompt"}
    assert ids_of(asked) == ids_of(body)
    return isinstance(asked.get("prompt"), list) or "prompt_token_ids" in asked["kv_transfer_params"]


@APIS
async def test_the_decode_engine_gets_the_ids_by_default(api):
    """It renders and tokenizes nothing, and its parameters are those of the prefill engine."""
    engines = Engines()
    await served(engines, api, BODIES[api], "0.32.0")

    (asked,) = engines.asked(Role.DECODE)
    assert has_ids(asked)
    assert asked["kv_transfer_params"]["remote_block_ids"] == [[1, 2]]
    assert "return_token_ids" not in asked


@APIS
async def test_what_the_client_asks_for_stays(api):
    """It gets the ids itself, too."""
    engines = Engines()
    client = await served(engines, api, BODIES[api] | {"return_token_ids": True}, "0.32.0")

    assert engines.asked(Role.DECODE)[0]["return_token_ids"] is True
    assert json.dumps(ids_of(BODIES[api]), separators=(",", ":")).encode() in client.body


@APIS
async def test_many_ids_arrive_whole(api):
    """They go as a piece of their own."""
    engines = Engines()
    text = "a river, " * 4000
    body = BODIES[api] | ({"prompt": text} if api is Api.COMPLETIONS else {"messages": [{"content": text}]})
    await served(engines, api, body, "0.32.0")

    (asked,) = engines.asked(Role.DECODE)
    assert ids_of(asked) == ids_of(body)
    assert len(ids_of(asked)) > 30_000
    assert isinstance(asked.get("prompt"), list) or "prompt_token_ids" in asked["kv_transfer_params"]


@pytest.mark.parametrize(
    ("version", "takes"),
    [
        *((old, False) for old in (None, "0.31.0", "0.30.1rc2", "dev", "", "0.9.2")),
        *((new, True) for new in ("0.32.0", "0.32.1rc1.dev7+g1", "0.33.0", "1.0.0")),
    ],
)
async def test_a_chats_ids_go_to_versions_that_are_known_to_drop_no_image(version, takes):
    """Before 0.32 they stand for messages with images, too: text without the image, and status 200."""
    engines = Engines()
    await served(engines, Api.CHAT, CHAT, version)

    assert has_ids(*engines.asked(Role.DECODE)) is takes
    assert engines.asked(Role.PREFILL)[0].get("return_token_ids", False) is takes


async def test_every_version_takes_a_completions_ids():
    engines = Engines()
    await served(engines, Api.COMPLETIONS, TEXT, None)

    assert has_ids(*engines.asked(Role.DECODE))


@pytest.mark.parametrize(
    ("versions", "takes"), [(("0.32.0", None), False), (("0.32.0", "0.31.0"), False), (("0.32.0", "0.32.0"), True)]
)
async def test_another_decode_engine_gets_what_it_can_take(versions, takes):
    """The first one could not be reached; the other may be of a version that nobody has asked yet."""
    engines = Engines(dead=(1,))
    await served(engines, Api.CHAT, CHAT, *versions)

    first, second = engines.asked(Role.DECODE)
    assert has_ids(first)
    assert has_ids(second) is takes


def _none(answer):
    for place in (answer, answer["choices"][0]):
        if "prompt_token_ids" in place:
            place["prompt_token_ids"] = None


def _absent(answer):
    for place in (answer, answer["choices"][0]):
        place.pop("prompt_token_ids", None)


def _empty(answer):
    for place in (answer, answer["choices"][0]):
        if "prompt_token_ids" in place:
            place["prompt_token_ids"] = []


def _elsewhere(answer):
    _absent(answer)
    answer["usage"]["prompt_token_ids"] = [1, 2, 3]


@APIS
@pytest.mark.parametrize("spoil", [_none, _absent, _empty, _elsewhere])
async def test_without_ids_the_decode_engine_tokenizes(api, spoil):
    """A prefill engine of an older version does not know the question."""
    engines = Engines(spoil=spoil)
    await served(engines, api, BODIES[api], "0.32.0")

    assert not has_ids(*engines.asked(Role.DECODE))


IMAGE = [{"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]


@pytest.mark.parametrize(
    ("api", "change"),
    [
        (Api.CHAT, {"return_prompt_text": True}),
        (Api.COMPLETIONS, {"suffix": "end"}),
        (Api.COMPLETIONS, {"prompt": [1, 2, 3]}),
        (Api.CHAT, {"messages": [{"role": "user", "content": IMAGE}]}),
        (Api.CHAT, {"messages": [{"role": "user", "content": "x" * LONGEST_PROMPT}]}),
        pytest.param(Api.COMPLETIONS, {"prompt": "x" * LONGEST_PROMPT}, marks=pytest.mark.slow),
    ],
    ids=["prompt-text", "suffix", "ids", "image", "long-chat", "long-text"],
)
async def test_engines_are_not_asked_for_ids_that_nobody_takes(api, change):
    """The answer has the prompt's text, vLLM fills no gap before a suffix with ids, or there are ids already.

    With an image D renders whatever it gets, and the ids of a long text may be more than an answer may have.
    """
    engines = Engines()
    body = BODIES[api] | change
    await served(engines, api, body, "0.32.0")

    (asked,) = engines.asked(Role.DECODE)
    assert {name: asked[name] for name in body} == body
    assert "prompt_token_ids" not in asked["kv_transfer_params"]
    assert "return_token_ids" not in engines.asked(Role.PREFILL)[0]


@pytest.mark.slow  # a prompt of sixteen megabytes
async def test_an_answer_with_all_ids_of_the_longest_prompt_is_read():
    """One token for each byte, of a vocabulary of millions."""
    engines = Engines(spoil=_every_byte)
    router = knowing(engines, "0.32.0")
    client = await router.serve(call(Api.COMPLETIONS, **TEXT | {"prompt": "x" * (LONGEST_PROMPT - 2)}))
    assert client.status == 200

    (asked,) = engines.asked(Role.DECODE)
    assert len(asked["prompt"]) == LONGEST_PROMPT


def _every_byte(answer):
    answer["choices"][0]["prompt_token_ids"] = [1_000_000] * LONGEST_PROMPT

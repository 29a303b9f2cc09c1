"""A stream that goes on although its engine has broken off, as an option."""

import json

import pytest

from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities, facts_of_models
from pdrelay_proxy.core.model import Api, Role
from pdrelay_proxy.core.schemas import ModelCard
from pdrelay_proxy.errors import EngineError
from pdrelay_proxy.requests.request import Request
from pdrelay_proxy.requests.response import HttpResponse
from support.greedy import event, events, read
from support.scripted import Scripted, call, never, prefilled, pulled_prefill, request_id, router_of, until

BODY = {"stream": True, "temperature": 0, "max_tokens": 12, "stream_options": {"include_usage": True}}
BODIES = {Api.COMPLETIONS: BODY | {"prompt": "hi"}, Api.CHAT: BODY | {"messages": [{"role": "user", "content": "hi"}]}}
ERROR = b'data: {"error":{"message":"dead","code":500}}\n\ndata: [DONE]\n\n'
HOW = {"it breaks off": EngineError("broke off"), "it says so": ERROR}


def breaking(*after, how=HOW["it breaks off"]):
    """Decode engines: the first legs break off after so many events, the others do not."""
    left = list(after)

    async def decode(leg):
        stream = list(events(json.loads(leg.body), name=f"cmpl-{request_id(leg)}"))
        if not left:
            return 200, stream
        return 200, [*stream[: left.pop(0)], how]

    return decode


def decoding(first, then=list):
    """Engines of which the first makes this of its stream, and the others that."""

    async def decode(leg):
        stream = list(events(json.loads(leg.body), name="cmpl-r"))
        return 200, (first if leg.instance.id == "decode-0" else then)(stream)

    return Scripted(pulled_prefill, decode)


def whole():
    """What a client should have read at the end."""
    return read(b"".join(events(BODIES[Api.COMPLETIONS], name="cmpl-r")))


async def served(engines, api=Api.COMPLETIONS, *, resume_streams=True, **options):
    router = router_of(engines, resume_streams=resume_streams, **options)
    client = await router.serve(call(api, **BODIES[api]))
    assert not engines.open
    assert router.is_idle()
    assert client.response.is_whole
    return client


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.parametrize("api", BODIES)
async def test_the_client_gets_the_text_of_one_engine(api, how):
    """One id, one usage, one end; twice in a row."""
    engines = Scripted(pulled_prefill, breaking(5, 4, how=how))
    client = await served(engines, api, y=3)

    assert read(client.body) == read(b"".join(events(BODIES[api], name="cmpl-r")))
    assert len({leg.instance.id for leg in engines.of(Role.DECODE)}) == 3
    assert len({request_id(leg) for leg in engines.of(Role.DECODE)}) == 3
    assert len(engines.of(Role.PREFILL)) == 1  # the others compute their prompt themselves
    assert [str(retry) for retry in client.record.retries] == ["decode-0 bad_response", "decode-1 bad_response"]


async def test_the_broken_leg_is_closed_before_the_next_is_sent():
    """Whatever is left of it must not go on behind the client's back."""
    seen = []

    async def decode(leg):
        seen.append([one.instance.id for one in engines.open if one is not leg])
        return await script(leg)

    script = breaking(5)
    engines = Scripted(pulled_prefill, decode)
    await served(engines, y=2)

    assert seen == [[], []]


async def test_a_stream_that_had_all_its_tokens_needs_no_other_engine():
    """Only its usage and its end were missing."""
    whole = list(events(BODIES[Api.COMPLETIONS], name="cmpl-r"))
    engines = Scripted(pulled_prefill, breaking(len(whole) - 2))
    client = await served(engines)

    assert read(client.body) == read(b"".join(whole))
    assert len(engines.legs) == 2


@pytest.mark.parametrize("options", [{"resume_streams": False}, {"retries": 0}, {"retries": 1}])
async def test_there_is_an_end_to_it(options):
    """The client gets an error after what it has."""
    engines = Scripted(pulled_prefill, breaking(5, 4, 3))
    client = await served(engines, y=4, **options)

    assert client.error == ("EngineError", "broke off")
    assert client.got.count(b"data: ") >= 5
    assert b"DONE" not in client.body
    assert len(engines.of(Role.DECODE)) == 1 + options.get("retries", 0)


@pytest.mark.parametrize("end", [list, lambda stream: [*stream[:-2], EngineError("broke off")]], ids=["whole", "cut"])
async def test_the_usage_of_an_engine_that_gave_up_before_its_first_token_is_no_clients(end):
    """vLLM ends such a chat with a usage of no token; the client would have two, or that alone."""
    plans = [lambda stream: [stream[0], nothing, b"data: [DONE]\n\n"], end, list]
    usage = {"prompt_tokens": 4, "completion_tokens": 0, "total_tokens": 4}
    nothing = event({"id": "cmpl-r", "created": 7, "model": "m", "choices": [], "usage": usage})

    async def decode(leg):
        return 200, plans.pop(0)(list(events(json.loads(leg.body), name="cmpl-r")))

    client = await served(Scripted(pulled_prefill, decode), Api.CHAT, y=2)

    assert read(client.body) == read(b"".join(events(BODIES[Api.CHAT], name="cmpl-r")))


def weigh(router, *roots, **facts):
    """Have decode engines say where the files of their model lie."""
    for number, root in enumerate(roots):
        router.registry.learn(f"decode-{number}", facts_of_models([ModelCard("m", root=root)]))
        router.registry.learn(f"decode-{number}", EngineCapabilities(**facts))


@pytest.mark.parametrize("facts", [{}, {"fingerprint": "f" * 8}], ids=["their lists of models", "a connector, too"])
async def test_a_stream_goes_on_with_the_weights_that_it_began_with(facts):
    """A model may be replaced under its name, and both are there while that is rolled out: two halves are no answer."""
    engines = Scripted(pulled_prefill, breaking(5))
    router = router_of(engines, y=4, resume_streams=True)
    weigh(router, "/m/1", "/m/2", "/m/2", "/m/1", **facts)
    client = await router.serve(call(Api.COMPLETIONS, **BODY | {"prompt": "hi"}))

    assert read(client.body) == whole()
    assert [leg.instance.id for leg in engines.of(Role.DECODE)] == ["decode-0", "decode-3"]


async def test_an_engine_that_was_replaced_under_its_address_has_its_own_weights():
    """Its connector's fingerprint may be the same, and is all that pairs of engines are told apart by."""
    engines = Scripted(pulled_prefill, breaking(5))
    router = router_of(engines, y=3, resume_streams=True)
    weigh(router, "/m/1", "/m/1", "/m/1", fingerprint="f" * 8)
    weigh(router, "/m/1", "/m/2")
    client = await router.serve(call(Api.COMPLETIONS, **BODY | {"prompt": "hi"}))

    assert read(client.body) == whole()
    assert [leg.instance.id for leg in engines.of(Role.DECODE)] == ["decode-0", "decode-2"]


async def test_an_adapter_goes_on_with_the_weights_that_it_began_with():
    """Its files may be replaced under its name, too; those of its base model are the same."""
    engines = Scripted(pulled_prefill, breaking(5))
    router = router_of(engines, y=4, resume_streams=True)
    for number, place in enumerate(("/a/1", "/a/2", "/a/2", "/a/1")):
        cards = [ModelCard("base", root="/m/1"), ModelCard("m", parent="base", root=place)]
        router.registry.learn(f"decode-{number}", facts_of_models(cards))
    client = await router.serve(call(Api.COMPLETIONS, **BODY | {"prompt": "hi", "model": "m"}))

    assert read(client.body) == whole()
    assert [leg.instance.id for leg in engines.of(Role.DECODE)] == ["decode-0", "decode-3"]


@pytest.mark.parametrize("fields", [{}, {"model": None}, {"model": ""}], ids=str)
@pytest.mark.parametrize("api", BODIES)
@pytest.mark.parametrize("x", [0, 1])
async def test_the_rest_names_the_model_that_the_stream_began_with(x, api, fields):
    """Its client has named none, and the engine that goes on may serve another one: it looks at the name."""
    engines = Scripted(pulled_prefill, breaking(5))
    router = router_of(engines, x, 2, resume_streams=True)
    client = await router.serve(call(api, **BODIES[api] | fields))

    assert read(client.body) == read(b"".join(events(BODIES[api], name="cmpl-r")))
    assert json.loads(engines.legs[-1].body)["model"] == "m"


async def only_the_first_is_asked(router, engines):
    """The second decode engine has other weights."""
    weigh(router, "/m/1", "/m/2")
    client = await router.serve(call(Api.COMPLETIONS, **BODY | {"prompt": "hi"}))

    assert client.error == ("EngineError", "broke off")
    assert {leg.instance.id for leg in engines.of(Role.DECODE)} == {"decode-0"}
    assert router.is_idle()


async def test_other_weights_are_not_the_last_resort():
    """The engine that broke off is asked once more, as a single one would be; then there is an end to it."""
    engines = Scripted(pulled_prefill, breaking(2, 2, 2))
    router = router_of(engines, y=2, resume_streams=True)

    await only_the_first_is_asked(router, engines)


async def test_a_stream_ends_with_its_error_where_only_other_weights_are_left():
    """Also where its engine is gone."""

    async def decode(leg):
        router.registry.departures.drain("decode-0", now=0.0)
        return await script(leg)

    script = breaking(5)
    engines = Scripted(pulled_prefill, decode)
    router = router_of(engines, y=2, resume_streams=True)

    await only_the_first_is_asked(router, engines)


LOOKS_BACK = {"transfer_mode": "pull", "pdrelay_looks_back": True}


class Saying:
    """A prefill engine that says these of itself, one answer after the other, and then the last for ever."""

    def __init__(self, *says):
        self._says = list(says)

    async def __call__(self, leg):
        return prefilled(leg, **(self._says.pop(0) if len(self._says) > 1 else self._says[0]))


async def test_engines_whose_own_defaults_look_back_go_on_with_nothing(caplog):
    """The router cannot see a penalty of the generation config. What has begun before it was said ends there, too."""
    router = router_of(Scripted(Saying(LOOKS_BACK), breaking(5, 4)), 1, 2, resume_streams=True)

    for _ in range(2):
        client = await router.serve(call(Api.COMPLETIONS, **BODIES[Api.COMPLETIONS]))
        assert client.error == ("EngineError", "broke off")
        assert b"DONE" not in client.body
    assert caplog.text.count("prefill-0 has defaults of its own that look back at the tokens made so far") == 1


@pytest.mark.parametrize("why", ["it says so no more", "it is gone"])
async def test_streams_are_resumed_again_when_no_engine_looks_back(why):
    """Engines are replaced by others with another generation config."""
    says = Saying(LOOKS_BACK, {"transfer_mode": "pull"})
    router = router_of(Scripted(says, breaking(5, 5, 5)), 2, 3, resume_streams=True)
    first = await router.serve(call(Api.COMPLETIONS, **BODIES[Api.COMPLETIONS]))
    if why == "it is gone":
        router.registry.remove("prefill-0", now=0.0)
    else:
        router.registry.departures.drain("prefill-1", now=0.0)
        told = await router.serve(call(Api.COMPLETIONS, **BODIES[Api.COMPLETIONS]))
        assert told.error == ("EngineError", "broke off")  # it had begun before
    then = await router.serve(call(Api.COMPLETIONS, **BODIES[Api.COMPLETIONS]))

    assert first.error == ("EngineError", "broke off")
    assert read(then.body) == whole()


async def test_if_nobody_takes_over_the_first_failure_is_told():
    """It is why."""

    async def decode(leg):
        if len(engines.of(Role.DECODE)) > 1:
            raise EngineError("full")
        return await script(leg)

    script = breaking(5)
    engines = Scripted(pulled_prefill, decode)

    assert (await served(engines, y=2)).error == ("EngineError", "broke off")


async def test_an_event_without_its_empty_line_is_closed_before_another_engine_goes_on():
    """Two events in one are none that a client can read."""
    engines = decoding(lambda stream: [*stream[:4], stream[4].rstrip(b"\n") + b"\n", EngineError("broke off")])
    client = await served(engines, y=2)

    assert all(event.count(b"data:") == 1 for event in client.body.split(b"\n\n") if event)
    assert read(client.body) == whole()


async def test_an_end_that_is_added_is_an_event_of_its_own():
    """The stream had its last token, and broke off in the middle of its last event."""

    def cut(stream):
        last = next(at for at, event in enumerate(stream) if b'"finish_reason":"' in event.replace(b": ", b":"))
        return [*stream[:last], stream[last].rstrip(b"\n") + b"\n", EngineError("broke off")]

    client = await served(decoding(cut))

    assert all(event.count(b"data:") == 1 for event in client.body.split(b"\n\n") if event)
    assert read(client.body) == whole()


async def test_what_takes_over_must_be_a_stream():
    """Something else with status 200 (a page of a proxy in between) is not the rest of an answer."""

    async def decode(leg):
        stream = list(events(json.loads(leg.body), name="cmpl-r"))
        if leg.instance.id == "decode-0":
            return 200, [*stream[:4], EngineError("broke off")]
        return 200, [b"<html>sorry</html>"], "text/plain"

    client = await served(Scripted(pulled_prefill, decode), y=2)

    assert client.error == ("EngineError", "broke off")
    assert b"html" not in client.body


@pytest.mark.parametrize("end", [[EngineError("broke off")], [], [b"data: [DO"]], ids=["broken", "no end", "half"])
@pytest.mark.parametrize("resume", [True, False])
async def test_a_stream_that_another_engine_goes_on_with_counts_against_the_first(end, resume):
    """However it has ended, and whether or not a client notices: health and metrics go by it."""
    router = router_of(decoding(lambda stream: [*stream[:4], *end]), y=2, resume_streams=resume)
    await router.serve(call(**BODIES[Api.COMPLETIONS]))

    legs = {key: count for key, count in router.telemetry.counters.legs.items() if key[1] == "decode"}
    taken_over = {("decode-1", "decode", "ok"): 1} if resume else {}
    assert legs == {("decode-0", "decode", "bad_response"): 1} | taken_over


ERROR_EVENT = b'data: {"error":{"message":"dead","code":500}}\n\n'


async def test_an_event_and_an_error_in_one_piece_both_count():
    """The last token was lost, and the stream ended well: the error behind it was looked at first."""
    engines = decoding(lambda stream: [*stream[:-3], stream[-3] + ERROR_EVENT, b"data: [DONE]\n\n"])

    assert read((await served(engines)).body) == whole()


async def test_an_event_before_an_error_is_shown_if_nobody_goes_on():
    """Then the error follows it."""
    engines = decoding(lambda stream: [*stream[:3], stream[3] + ERROR_EVENT, b"data: [DONE]\n\n"])
    client = await served(engines, retries=0)

    assert client.body.count(b"data: ") == 5
    assert client.error is not None


async def test_a_stream_that_broke_off_in_its_first_piece_is_shown_as_it_goes_on():
    """Its beginning was said to be all of it, and the client would have waited for the end of the other engine's."""
    engines = decoding(lambda s: [s[0] + s[1] + ERROR_EVENT], then=lambda s: [*s[:3], never()])
    engines.ends_at_once = True
    router = router_of(engines, resume_streams=True, y=2)
    asked = call(Api.COMPLETIONS, **BODIES[Api.COMPLETIONS])
    written = []
    headers = ((b"host", b"localhost"), (b"content-type", b"application/json"))
    request = Request(router.requests, HttpResponse(Silent(), written.append, keep_alive=True), asked.path, headers)
    assert request.check()
    request.receive_body(asked.body, is_all=True)
    request.serve()
    await until(lambda: b"".join(written).count(b"data: ") == 5)
    request.leave()

    assert router.is_idle()


class Silent:
    """A connection whose answers are looked at as they are written."""

    def default_lines(self):
        return b""

    def answered(self, *, keep_alive):
        del keep_alive

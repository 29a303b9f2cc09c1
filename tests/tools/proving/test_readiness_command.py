"""Findings and exit codes of ``pdrelay check``."""

import socket
from contextlib import ExitStack

import pytest

from pdrelay_proxy.cli import main
from pdrelay_tools.simulated.engine import FaultKind, Sim, SimulatedFault
from support.sim import fleet, serving

pytestmark = pytest.mark.edges


@pytest.fixture
def check(capsys):
    """Run the command; give its exit code and its lines."""

    def run(*arguments):
        code = main(["check", *arguments])
        said = capsys.readouterr()
        assert not said.err or code == 2
        return code, (said.out or said.err).splitlines()

    return run


@pytest.fixture
def engines():
    """A prefill and two decode engines that count what moves, and the flags that name them."""
    with fleet(1, 2) as (found, at, flags):
        roles = {"p": "kv_producer", "d": "kv_consumer"}
        for name, engine in found.items():
            engine.loads.are_shown = True
            engine.loads.info["kv_role"] = roles[name[0]]
        yield found, at, flags


def _asking_for_a_key(engine, key):
    async def app(scope, receive, send):
        headers = dict(scope.get("headers", ()))
        if scope["type"] == "http" and scope["path"].startswith("/v1/") and headers.get(b"authorization") != key:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        await engine(scope, receive, send)

    return app


@pytest.mark.parametrize("mode", ["pull", "push", "auto"])
def test_engines_that_are_ready_exchange_kv_once_each(check, mode):
    """A line for each engine and each pair; nobody is left out, and nobody is asked for all pairs."""
    with fleet(3, 2, mode=mode) as (engines, _, flags):
        for engine in engines.values():
            engine.loads.are_shown = True
        code, lines = check(*flags)

    assert (code, lines[-1]) == (0, "Ready: each engine exchanged KV with another one.")
    assert [line.split(":")[0].split()[1:] for line in lines[:5]] == [
        [name] for name in ("prefill-0", "prefill-1", "prefill-2", "decode-0", "decode-1")
    ]
    assert sorted(line.split()[1] for line in lines[5:-1]) == ["prefill-0", "prefill-1", "prefill-2"]
    assert all("2,000,000 bytes moved" in line for line in lines[5:-1])
    assert [engine.violations for engine in engines.values()] == [[]] * 5


def test_an_engine_line_says_what_the_engine_tells_of_itself(check, engines):
    """An operator sees at a glance that it is the right one."""
    _, at, flags = engines
    _, lines = check(*flags)

    said = f"answers at http://{at['p0']}, vLLM 0.32.0, model sim, connector pdrelay, kv_role kv_producer"
    assert lines[0] == f"ok       prefill-0: {said}"


def test_loads_that_fail_are_no_success_though_the_answer_is_right(check, engines):
    """The decode engine computes the prompt itself, and says why: here it has another secret."""
    found, _, flags = engines
    found["d1"].loads.unmet[found["p0"].engine_id] = "secret"
    code, lines = check(*flags)

    (failed,) = [line for line in lines if line.startswith("FAILED")]
    assert code == 1
    assert failed.startswith("FAILED   prefill-0 to decode-1: answered, and no KV moved: decode-1 computed the prompt")
    assert failed.endswith("because [::1]:5600 was not met: secret, it says")


def test_engines_of_the_other_role_are_named(check, engines):
    """Both were taken for each other."""
    found, _, flags = engines
    found["p0"].loads.info["kv_role"] = "kv_consumer"
    code, lines = check(*flags)

    assert code == 1
    said = "prefill-0 is a prefill engine that was started with kv_role kv_consumer, so it hands no KV cache over"
    assert f"FAILED   engines: {said}" in lines


def test_engines_that_would_refuse_each_other_are_not_asked(check, engines):
    """Their fingerprints differ: model, cache or vLLM."""
    found, _, flags = engines
    found["p0"].loads.info["fingerprint"] = "aa"
    for name, mark in (("d0", "aa"), ("d1", "bb")):
        found[name].loads.info["fingerprint"] = mark
    code, lines = check(*flags)

    assert code == 1
    why = "they share no request: the connector's fingerprint is aa there and bb here"
    assert f"FAILED   decode-1 with prefill-0: {why}" in lines
    left = "it exchanged no KV: no engine of the other role that answers fits it"
    assert f"FAILED   decode-1: {left}" in lines
    assert not [entry for entry in found["d1"].log if entry.path.startswith("/v1/comp")]


def test_engines_of_different_models_are_named(check):
    """No request could have both."""
    with serving(Sim("prefill", model="a")) as prefill, serving(Sim("decode", model="b")) as decode:
        code, lines = check("--prefill", prefill, "--decode", decode)

    assert code == 1
    assert "FAILED   engines: prefill-0: no decode engine serves a, so requests for it are refused" in lines


def test_what_is_not_reachable_is_said_in_a_sentence(check, engines):
    """Refused, no such name, no TLS."""
    _, at, _ = engines
    code, lines = check("--prefill", "127.0.0.1:1", "nowhere.invalid:8100", "--decode", f"https://{at['d0']}")

    assert code == 1
    assert lines[:3] == [
        "FAILED   prefill-0: http://127.0.0.1:1 cannot be reached: the connection is refused: nothing listens there",
        "FAILED   prefill-1: http://nowhere.invalid:8100 cannot be reached: its name does not resolve",
        f"FAILED   decode-0: https://{at['d0']} speaks no TLS, though its address begins with https",
    ]


def test_a_silent_engine_takes_its_time_and_no_more(check, engines):
    """What is bounded is all of it, not each question."""
    _, at, _ = engines
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        code, lines = check("--prefill", where, "--decode", at["d0"], "--seconds", "1")

    assert code == 1
    assert lines[0] == f"FAILED   prefill-0: http://{where} does not answer /health within 0.3 s"


def test_a_key_is_shown_from_the_environment_or_a_file(check, monkeypatch, tmp_path):
    """As the router shows it; without it the engine says no."""
    key = tmp_path / "key"
    key.write_text("sesame\n")
    engines = {role: Sim(role) for role in ("prefill", "decode")}
    for engine in engines.values():
        engine.loads.are_shown = True
    with (
        serving(_asking_for_a_key(engines["prefill"], b"Bearer sesame")) as prefill,
        serving(_asking_for_a_key(engines["decode"], b"Bearer other")) as decode,
    ):
        flags = ["--prefill", prefill, "--decode", decode]
        refused = check(*flags)
        monkeypatch.setenv("PDRELAY_DECODE_API_KEY", "other")
        accepted = check(*flags, "--prefill-api-key-file", str(key))

    assert refused[0] == 1
    said = "wants another API key (PDRELAY_PREFILL_API_KEY or prefill_api_key_file)"
    assert refused[1][0] == f"FAILED   prefill-0: http://{prefill} {said}"
    assert accepted[0] == 0
    assert accepted[1][0].endswith("accepts the key")


def test_a_request_that_fails_is_shown_in_the_words_of_the_engine(check, engines):
    """On one line, whatever is in them."""
    found, _, flags = engines
    found["p0"].inject(SimulatedFault(FaultKind.STATUS, body="no\nroom\x1b[2J"))
    code, lines = check(*flags)

    assert code == 1
    said = "the request failed: HTTP 500: no\\nroom\\x1b[2J"
    assert [line for line in lines if "to decode" in line] == [
        f"FAILED   prefill-0 to decode-{number}: {said}" for number in range(2)
    ]


def _counting(engine, most):
    """Note in a list how many requests for text the engine has at a time."""
    under_way = 0

    async def app(scope, receive, send):
        nonlocal under_way
        is_request = scope["type"] == "http" and scope["method"] == "POST"
        under_way += is_request
        most.append(under_way)
        try:
            await engine(scope, receive, send)
        finally:
            under_way -= is_request

    return app


def test_pairs_of_one_prefill_engine_take_turns(check):
    """On two cores three requests at once took longer than all of the time, and healthy engines had failed."""
    prefill = Sim("prefill", prefill_s=0.05)
    decodes = [Sim("decode", token_s=0.01) for _ in range(3)]
    for engine in (prefill, *decodes):
        engine.loads.are_shown = True
    most = []
    with ExitStack() as stack:
        at = stack.enter_context(serving(_counting(prefill, most)))
        flags = [word for each in decodes for word in ("--decode", stack.enter_context(serving(each)))]
        code, lines = check("--prefill", at, *flags)

    assert (code, lines[-1]) == (0, "Ready: each engine exchanged KV with another one.")
    assert max(most) == 1


def test_what_takes_too_long_is_not_known_and_the_others_are(check, engines):
    """An engine that is slow may be well: the line says how to give it more time."""
    found, _, flags = engines
    found["d0"]._token_s = 30.0
    for _ in range(5):  # a busy machine may keep the others from their answers, too
        code, lines = check(*flags, "--seconds", "2")
        if lines[-1] == "Not known: 1 of 5 findings need more time.":
            break

    more = "that is no proof of a fault, so allow more time (--seconds 12)"
    (unknown,) = [line for line in lines if line.startswith("unknown ")]
    assert code == 1
    assert unknown.startswith("unknown  prefill-0 to decode-0: decode-0 gave no whole answer within ")
    assert unknown.endswith(f": {more}")
    assert any(line.startswith("ok       prefill-0 to decode-1: 2,000,000 bytes moved") for line in lines)
    assert lines[-1] == "Not known: 1 of 5 findings need more time."


def test_what_no_engine_counts_is_not_taken_for_good(check):
    """Simulated engines have no KV: it is said, and it is no success."""
    with fleet(1, 1) as (_, _, flags):
        code, lines = check(*flags)

    assert code == 1
    assert lines[-2].endswith("neither engine counts what moves: whether KV moved cannot be known")
    assert lines[-1] == "Not known whether KV moves: see above."


def test_engines_may_be_named_by_the_routers_file(check, engines, tmp_path):
    """The same file that the router is started with."""
    _, at, _ = engines
    file = tmp_path / "router.toml"
    file.write_text(f'prefill = ["{at["p0"]}"]\ndecode = ["{at["d0"]}"]\nport = 9000\n')

    assert check("--config", str(file))[0] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name engines of both roles"),
        (["--prefill", "a:1"], "name engines of both roles"),
        (["--prefill", "a:1", "a:1", "--decode", "b:1"], "name every engine once"),
        (["--prefill", "a:1", "--decode", "b:1", "--engine-ca", "/nowhere"], "/nowhere cannot be read"),
    ],
)
def test_what_cannot_be_asked_like_this_is_another_code(check, arguments, said):
    """In one sentence."""
    code, lines = check(*arguments)

    assert code == 2
    assert len(lines) == 1
    assert said in lines[0]

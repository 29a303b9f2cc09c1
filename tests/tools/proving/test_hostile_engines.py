"""The command in front of servers that answer anything: it ends in time, with what was seen and no traceback."""

import json
import time
from functools import partial

import pytest

from pdrelay_proxy.cli import main
from support.raw_engine import closing, pour, raw_engine

pytestmark = pytest.mark.edges


IDLE = b'vllm:kv_cache_usage_perc{engine="0"} 0.0\nvllm:num_requests_running{engine="0"} 0.0\n'
MODELS = json.dumps({"data": [{"id": "sim"}]}).encode()
PARAMS = json.dumps({"kv_transfer_params": {"remote_engine_id": "e"}, "choices": []}).encode()


def answer(body, head=b""):
    return b"HTTP/1.1 200 OK\r\n%bContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (head, len(body), body)


def engine(completion=b"", *, models=MODELS, metrics=IDLE):
    """Answer what is asked before any check as an engine at rest does, and requests as told."""

    def script(server, talk):
        request = talk.request()
        path = request.head.split(b" ")[1]
        known = {b"/health": b"", b"/v1/models": models, b"/metrics": metrics}
        if path in known:
            talk.send(answer(known[path]))
        elif callable(completion):
            completion(talk)
        else:
            talk.send(answer(completion))

    return script


DRIP = partial(pour, beginning=b"HTTP/1.1 200 OK\r\n\r\n", piece=b" ", pause_s=0.1)
FLOOD = partial(pour, beginning=b"HTTP/1.1 200 OK\r\n\r\n", piece=b"data: \n\n" * 10_000)


ENDLESS = "--timeout=3"  # for answers that never end: each is waited for, and the reference has no longer, either


def prove(prefill, decode, reference, *flags):
    urls = [f"--prefill={prefill.at}", f"--decode={decode.at}", f"--reference={reference.at}"]
    return main(["prove", *urls, "--idle-seconds=1", "--lease-seconds=1", *flags])


@pytest.fixture
def well(fleet):
    """A reference that is well."""
    return type("Well", (), {"at": fleet.at["reference"]})


@pytest.mark.parametrize(
    "garbage",
    [
        DRIP, FLOOD, b"", b"[" * 100_000, b"{}", b'{"choices": [{"index": -1, "finish_reason": ""}]}', b"\xff" * 1000,
        b'{"choices": [{"index": 1e400}]}', b'{"choices": null, "usage": {"prompt_tokens": 1e9}}',
        PARAMS.replace(b'{"remote_engine_id": "e"}', b'{"a":' * 5000 + b"1" + b"}" * 5000),
        PARAMS.replace(b'"e"', b'"' + b"e" * 1_000_000 + b'"'),
    ],
    ids=["drip", "flood", "empty", "deep", "object", "choice", "bytes", "infinite", "nulls", "deep-params", "long"],
)  # fmt: skip
@pytest.mark.slow  # what drips takes a minute
def test_answers_that_make_no_sense_are_findings(well, capsys, garbage):
    """Of the prefill engine, or of the decode engine behind a prefill engine that is well."""
    began = time.monotonic()
    for kinds in ((garbage, PARAMS), (PARAMS, garbage)):
        with raw_engine(engine(kinds[0])) as prefill, raw_engine(engine(kinds[1])) as decode:
            checks = ("--only=refused", "--only=abandoned-streams", "--only=burst")
            code = prove(prefill, decode, well, ENDLESS, *checks)
        out, err = capsys.readouterr()

        assert code == 1, err
        assert "Traceback" not in err
        assert len(out) + len(err) < 20_000
    assert time.monotonic() - began < 120


@pytest.mark.parametrize(
    "labels", [b"a" * 2_000_000, b'a="' * 500_000, b'a="b' * 500_000, b",a=" * 500_000], ids=["one", "a", "b", "c"]
)
@pytest.mark.slow  # megabytes of metrics
def test_metrics_of_one_long_line_are_read_in_time(well, capsys, labels):
    """A pattern that begins anew at each letter would take days, and a run that reads does not hear a signal."""
    metrics = IDLE + b"vllm:cache_config_info{" + labels + b"} 1.0\n"
    began = time.monotonic()
    with raw_engine(engine(b"", metrics=metrics)) as server:
        code = prove(server, server, well, "--only=refused")

    assert code == 1
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("said", [b'{"error": {"message": "%b"}}', b'{"error": "%b"}', b'{"choices": "%b"}'])
def test_words_of_an_error_are_cut(well, capsys, tmp_path, said):
    """An answer of a megabyte is no sentence of a page."""
    page = tmp_path / "page.md"
    with raw_engine(engine(PARAMS)) as prefill, raw_engine(engine(said.replace(b"%b", b"x" * 1_000_000))) as decode:
        code = prove(prefill, decode, well, "--only=burst", f"--report={page}")

    assert code == 1
    assert len(capsys.readouterr().err) < 10_000
    assert page.stat().st_size < 20_000


def test_a_model_without_end_is_refused(well, capsys):
    """Each request would carry its name."""
    models = json.dumps({"data": [{"id": "m" * 1_000_000}]}).encode()
    with raw_engine(engine(models=models)) as server:
        code = prove(server, server, well)

    assert code == 2
    assert len(capsys.readouterr().err) < 1000


def test_a_reference_that_does_not_answer_is_said_at_once(fleet, capsys):
    """Not after a time limit for each of a dozen questions."""
    began = time.monotonic()
    with raw_engine(engine(DRIP)) as reference:
        urls = [f"--prefill={fleet.at['p0']}", f"--decode={fleet.at['d0']}", f"--reference={reference.at}"]
        code = main(["prove", *urls, "--timeout=4"])

    assert code == 2
    assert "the reference reference does not answer" in (said := capsys.readouterr().err)
    assert "gave no whole answer within 4 s" in said
    assert time.monotonic() - began < 12


def test_a_name_that_no_resolver_takes_is_said(capsys):
    assert main(["prove", "--router", "http://xn--"]) == 2
    assert "does not serve" in capsys.readouterr().err


def test_a_status_line_that_is_none_is_said(capsys):
    with raw_engine(closing(b"HTTP/1.1 999999 \x1b[2J\r\n\r\n")) as server:
        code = main(["prove", "--router", server.at])

    assert code == 2
    assert "\x1b" not in capsys.readouterr().err

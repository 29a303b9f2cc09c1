"""``pdrelay replay``, as it is typed."""

import json
from xml.etree import ElementTree as ET

import pytest

from pdrelay_proxy.cli import main

TYPED = ("--sessions", "20", "--turns", "3", "--prefill", "2", "--decode", "2", "--ttft", "0.2", "--itl", "0.02")

TABLE = """\
60 requests on 2 prefill and 2 decode engines, 37 s

                TTFT p50     p95     p99  later p50  ITL p50     p99  hits P    D  of best  computed/new    good  uneven P     D
round_robin      76.7 ms  160 ms  205 ms    88.1 ms   8.4 ms  8.9 ms     58%  62%      69%          1.89   98.3%      1.02  1.03
session/prefix   59.5 ms  129 ms  171 ms    62.6 ms   8.5 ms  8.9 ms     69%  77%      88%          1.37  100.0%      1.20  1.04
"""  # noqa: E501


@pytest.fixture
def replayed(capsys):
    """Run the command; returns the exit code, what it printed and what it complained about."""

    def run(*arguments):
        try:
            code = main(["replay", *arguments])
        except SystemExit as ended:
            code = ended.code
        return code, *capsys.readouterr()

    return run


def test_the_answer_is_a_table(replayed):
    """A row for each policy."""
    code, out, err = replayed(*TYPED, "--policy", "round_robin", "--policy", "session/prefix")

    assert (code, err) == (0, "")
    assert out == TABLE


def test_the_same_as_json(replayed):
    """Times are seconds and shares are of 1."""
    _, out, _ = replayed(*TYPED, "--json")
    rows = json.loads(out)

    assert [row["policy"] for row in rows] == ["round_robin", "prefix"]
    assert all(row["requests"] == 60 and 0 < row["ttft_p50"] <= row["ttft_p95"] <= row["ttft_p99"] for row in rows)
    assert all(row["computed_per_new"] >= 1 and 0 <= row["good"] <= 1 for row in rows)


def test_a_picture(replayed, tmp_path):
    """Well-formed SVG that names the policies."""
    replayed(*TYPED, "--plot", str(tmp_path / "found.svg"))
    texts = [one.text for one in ET.fromstring((tmp_path / "found.svg").read_text()).iter() if one.text]

    assert texts.count("round_robin") == texts.count("prefix") == 4
    assert "time to first token" in texts


def test_a_picture_stays_if_nothing_is_replayed(replayed, tmp_path):
    """That it can be written is checked first, which must not empty the one of an earlier replay."""
    picture = tmp_path / "found.svg"
    picture.write_text("<svg/>")
    code, _, err = replayed("/absent", "--plot", str(picture))

    assert (code, err) == (2, "pdrelay replay: /absent cannot be read: No such file or directory\n")
    assert picture.read_text() == "<svg/>"


def test_a_file_and_an_engine(replayed, tmp_path):
    """An engine's file overrides what it names."""
    (tmp_path / "lengths.csv").write_text("prompt_tokens,output_tokens\n100,1\n")
    (tmp_path / "engine.json").write_text('{"prefill_token_s": 0.1, "step_s": 0, "leg_s": 0, "link_s": 0}')
    _, out, _ = replayed(
        str(tmp_path / "lengths.csv"), "--engine", str(tmp_path / "engine.json"), "--policy", "least_loaded", "--json"
    )

    (row,) = json.loads(out)
    assert row["ttft_p50"] == pytest.approx(101 * 0.1, rel=0.01)
    assert (row["itl_p50"], row["later_ttft_p50"]) == (None, None)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((), "give either a trace or --sessions"),
        (("x", "--sessions", "1"), "give either a trace or --sessions"),
        (("/absent",), "/absent cannot be read: No such file or directory"),
        (("--sessions", "1000", "--turns", "100000"), "more than 1,000,000 requests"),
        (("--sessions", "1", "--engine", "/absent"), "does not describe an engine: No such file"),
        (("--sessions", "1", "--policy", "best"), "there is no policy 'best': name one"),
        (("--sessions", "1", "--plot", "/absent/x.svg"), "/absent/x.svg cannot be written"),
        (("/absent", "--plot", "/absent/x.svg"), "/absent/x.svg cannot be written"),  # before anything is simulated
        (("--sessions", "0"), "'0' is not a count: write one from 1 to 1,000,000"),
        (("--sessions", "1", "--prefill", "1001"), "'1001' is not a number of engines: write one from 1 to 1,000"),
        (("--sessions", "1", "--rate", "nan"), "'nan' is not a number above 0"),
    ],
)
def test_one_sentence_for_what_is_wrong(replayed, arguments, why):
    """And exit code 2."""
    code, out, err = replayed(*arguments)

    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("pdrelay replay: ")
    assert why in err


@pytest.mark.parametrize(
    ("engine", "why"),
    [
        ('{"prefil_token_s": 0.1}', "unknown field `prefil_token_s`"),
        ('{"step_s": -1}', "Expected `float` >= 0"),
        ('{"max_num_batched_tokens": 64}', "max_num_batched_tokens must be at least max_num_seqs"),
        ("[]", "Expected `object`, got `array`"),
    ],
)
@pytest.mark.parametrize("flag", ["--engine", "--decode-engine"])
def test_an_engine_that_cannot_be(replayed, tmp_path, flag, engine, why):
    """A misspelt number would silently be a default."""
    (tmp_path / "engine.json").write_text(engine)

    code, _, err = replayed("--sessions", "1", flag, str(tmp_path / "engine.json"))

    assert (code, why in err) == (2, True)


def test_engines_that_take_no_time_are_refused(replayed, tmp_path):
    """Requests a second of them are no number."""
    times = ("step_s", "prefill_token_s", "prefill_context_s", "decode_request_s", "decode_context_s", "leg_s")
    (tmp_path / "engine.json").write_text(json.dumps(dict.fromkeys(times, 0)))
    flags = ("--turns", "1", "--policy", "round_robin:999999999", "--engine", str(tmp_path / "engine.json"))

    code, out, err = replayed("--sessions", "1", *flags)

    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "takes no time" in err


def test_decode_engines_of_another_kind(replayed, tmp_path):
    """They alone have its times."""
    (tmp_path / "engine.json").write_text('{"step_s": 0.5}')
    rows = [
        json.loads(replayed(*TYPED, "--policy", "round_robin", "--json", *more)[1])[0]
        for more in ((), ("--decode-engine", str(tmp_path / "engine.json")))
    ]

    assert rows[0]["itl_p50"] < 0.5 < rows[1]["itl_p50"]
    assert rows[1]["ttft_p50"] - rows[0]["ttft_p50"] > 0.4

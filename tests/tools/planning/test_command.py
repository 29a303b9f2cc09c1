"""``pdrelay plan``, as it is typed; and the example of docs/scaling.md."""

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest

from pdrelay_proxy.cli import main

TYPED = shlex.split(
    "--requests-per-second 20 --prompt-tokens 3000 --prompt-tokens-p95 8000 --output-tokens 250 "
    "--prefill-rate 24000 --decode-rate 2600 --kv-capacity 420000 --itl 0.03"
)
MEASURED = ("--prefill-rate", "--decode-rate", "--kv-capacity")
DOCS = Path(__file__).parents[3] / "docs" / "scaling.md"


@pytest.fixture
def planned(capsys):
    """Run the command; returns the exit code, what it printed and what it complained about."""

    def run(*arguments):
        try:
            code = main(["plan", *arguments])
        except SystemExit as ended:
            code = ended.code
        return code, *capsys.readouterr()

    return run


def _without(*flags):
    pairs = zip(TYPED[::2], TYPED[1::2], strict=True)
    return [word for flag, value in pairs if flag not in flags for word in (flag, value)]


def test_the_answer_is_a_page_of_text(planned):
    """The pools first, then why."""
    code, out, err = planned(*TYPED)

    assert (code, err) == (0, "")
    assert out.startswith("4 prefill and 3 decode engines, 4:3\nprefill is decided by: prefill compute\n")
    assert "link" not in out


def test_the_same_as_json(planned):
    """For scripts; ratios and shares are numbers."""
    _, out, _ = planned(*TYPED, "--kv-bytes-per-token", "131072", "--link-gbit", "100", "--ttft", "1.5", "--json")
    found = json.loads(out)

    assert (found["prefill"], found["decode"], found["ratio"]) == (4, 3, "4:3")
    assert found["utilisation"]["prefill compute"] == pytest.approx(0.625)
    assert found["utilisation"]["decode link"] == pytest.approx(20 * 3000 * 131072 / 12.5e9 / 3)
    assert [row["factor"] for row in found["traffic"]] == [0.75, 1.0, 1.25]
    assert found["ttft_s"]["p95"] <= 1.5


def test_traffic_may_be_given_in_tokens(planned):
    """As a dashboard shows it."""
    rest = _without("--requests-per-second")

    assert planned("--prompt-tokens-per-second", "60000", *rest) == planned(*TYPED)


def test_prompts_may_be_a_file_of_lengths(planned, tmp_path):
    """Such as the log of a gateway: mean and spread are their own."""
    (tmp_path / "lengths").write_text("1000 2000, 3000\n6000\n")
    rest = _without("--prompt-tokens", "--prompt-tokens-p95")
    _, out, _ = planned("--prompt-lengths", str(tmp_path / "lengths"), *rest, "--json")

    assert json.loads(out)["engines_busy"]["prefill compute"] == pytest.approx(20 * 3000 / 24000)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*TYPED, "--utilisation", "1.5"], "the target utilisation must be below 1, not 1.5"),
        ([*TYPED, "--cached", "-0.1"], "must be 0 or more and below 1, not -0.1"),
        ([*TYPED, "--link-gbit", "100"], "link bandwidth and KV bytes per token belong together"),
        ([*TYPED, "--prompt-lengths", "x"], "give either --prompt-tokens or --prompt-lengths"),
        (_without("--prompt-tokens", "--prompt-tokens-p95"), "give either --prompt-tokens or --prompt-lengths"),
        ([*_without("--prompt-tokens"), "--prompt-lengths", "x"], "--prompt-tokens-p95 belongs to --prompt-tokens"),
        ([*TYPED, "--prefill-rate", "fast"], "argument --prefill-rate: invalid float value: 'fast'"),
        (_without("--requests-per-second"), "one of the arguments --requests-per-second --prompt-tokens-per-second"),
        (_without("--itl"), "the following arguments are required: --itl"),
        ([*TYPED, "--prefill-policy", "prefix"], "invalid choice: 'prefix'"),
        (_without("--decode-rate"), "give --prefill-rate, --decode-rate and --kv-capacity, or --engine"),
        ([*TYPED, "--decode-engine", "x"], "give --prefill-rate, --decode-rate and --kv-capacity, or --engine"),
        ([*TYPED, "--engine", "x"], "--engine has rates, KV and link of its own"),
        ([*_without(*MEASURED), "--engine", "/nowhere"], "/nowhere does not describe an engine: No such file"),
    ],
)
def test_nonsense_is_one_sentence_and_exit_code_2(planned, arguments, said):
    """Not a trace, not a page of usage."""
    code, out, err = planned(*arguments)

    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("pdrelay plan: ")
    assert said in err


def test_an_engine_may_be_the_one_that_replay_simulates(planned, tmp_path):
    """One file for both: a slower decode engine makes more of them."""
    (tmp_path / "engine.json").write_text("{}")
    (tmp_path / "slow.json").write_text('{"decode_context_s": 5e-7}')
    typed = [*_without(*MEASURED), "--engine", str(tmp_path / "engine.json"), "--json"]
    found = json.loads(planned(*typed)[1])
    slow = json.loads(planned(*typed, "--decode-engine", str(tmp_path / "slow.json"))[1])

    assert found["prefill"] == slow["prefill"]
    assert found["decode"] < slow["decode"]
    assert "decode link" in found["utilisation"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "there are no prompt lengths"),
        (b"12 abc", "must hold numbers and nothing else: could not convert string to float: 'abc'"),
        (b"1e200 2", "every prompt length cannot be 1e+200: look at the units"),
        (b"12 -3", "every prompt length must be a number above 0, not -3"),
        (b"\xff\xfe", "cannot be read: it is not text"),
    ],
)
def test_a_file_of_lengths_that_cannot_be_used_is_refused(planned, tmp_path, content, said):
    """It is named."""
    file = tmp_path / "lengths"
    if content is not None:
        file.write_bytes(content)
    code, _, err = planned("--prompt-lengths", str(file), *_without("--prompt-tokens", "--prompt-tokens-p95"))

    assert (code, said in err) == (2, True), err


def _examples():
    """Find the commands of the page and what it says that they print."""
    blocks = re.findall(r"```console\n\$ (pdrelay plan .*?)```", DOCS.read_text(), re.DOTALL)
    for block in blocks:
        command, _, output = re.sub(r"\\\n\s*", "", block).partition("\n")
        yield command, output


def test_the_examples_of_the_scaling_guide_are_what_the_command_prints(planned):
    """To the last character: whoever follows the page sees the page."""
    examples = list(_examples())

    assert examples
    for command, output in examples:
        assert planned(*shlex.split(command)[2:]) == (0, output, "")


def test_the_scaling_guide_measures_with_flags_that_vllm_has():
    """Read out of vLLM's source: to import it would take longer than all other tests here."""
    if (vllm := importlib.util.find_spec("vllm")) is None:
        pytest.skip("vLLM is not installed")
    sources = (Path(vllm.origin).parent / "benchmarks").rglob("*.py")
    known = {flag for source in sources for flag in re.findall(r'"(--[a-z0-9-]+)"', source.read_text())}
    lines = re.sub(r"\\\n\s*", "", DOCS.read_text()).splitlines()
    used = {flag for line in lines if "vllm bench serve" in line for flag in re.findall(r"--[a-z-]+", line)}

    assert len(used) > 8
    assert used <= known

"""Simulated engines that turn: what the router's controller makes of traffic that changes sides, in virtual time."""

from functools import cache
from itertools import pairwise

import pytest

from pdrelay_proxy.cli import main
from pdrelay_proxy.core.model import Role
from pdrelay_proxy.features.roles.role_controller import RoleLimits
from pdrelay_proxy.features.roles.work_meter import RoleTargets
from pdrelay_tools.planning.engine_model import EngineModel
from pdrelay_tools.planning.replay.roles import RolesPlan
from pdrelay_tools.planning.replay.simulation import SimulatedFleet, replay
from pdrelay_tools.planning.replay.summary import Targets, summarise
from pdrelay_tools.planning.replay.traces import Phase, phased_trace

ENGINE = EngineModel(
    step_s=0.04, prefill_token_s=5e-4, decode_request_s=1e-3, decode_context_s=1e-6, max_num_batched_tokens=4096,
    kv_tokens=100_000, link_bytes_per_s=2e9,
)  # fmt: skip
TARGETS = Targets(6.0, 0.1)
TRACE = phased_trace([Phase(400, 2.7, 2500, 40), Phase(400, 2.6, 800, 300)], 64, 0)
LIMITS = RoleLimits(min_prefill=1, min_decode=1)


def plan(**options):
    return RolesPlan(RoleTargets(TARGETS.ttft_s, TARGETS.itl_s), LIMITS, **options)


@cache
def served(prefill, decode, roles=None):
    return replay(TRACE, "least_loaded", SimulatedFleet(prefill, decode, ENGINE, roles=roles), seed=0)


def good(found):
    return summarise(found, TARGETS).good


@pytest.mark.slow  # several replays of an hour
def test_engines_that_turn_serve_more_than_any_split():
    """1.3 times the best one: the reason to let them turn. docs/roles.md has 16 engines and hours."""
    static = [good(served(prefill, 6 - prefill)) for prefill in (4, 5)]  # the best two
    found = served(3, 3, plan())
    turned = [one.role for one in found.turned]

    assert good(found) > 1.3 * max(static)
    assert len(turned) <= LIMITS.turns_per_hour
    assert turned == sorted(turned, key=[Role.PREFILL, Role.DECODE].index)  # there, and later back: no turn in vain
    assert all(one.prefill >= 1 and one.decode >= 1 for one in found.turned)


@pytest.mark.parametrize("options", [{}, {"controllers": 2}, {"dies_every_s": 150.0}], ids=["one", "doubled", "killed"])
@pytest.mark.slow  # three replays of an hour
def test_no_request_is_lost_whatever_happens_to_the_controller(options):
    """Turns are drains: who decides on them, and whether they go on, is nothing that a request sees."""
    found = served(3, 3, plan(**options))

    assert len(found.served) == len(TRACE.turns)
    assert all(one.came < one.first <= one.ended for one in found.served)
    assert sum(log.itl_count for _, log in found.engines) == sum(turn.output_tokens - 1 for turn in TRACE.turns)
    assert len(found.turned) <= LIMITS.turns_per_hour
    began = [one.began for one in found.turned]
    assert all(later - earlier >= LIMITS.cooldown_s for earlier, later in pairwise(began))


def test_phases_have_their_rates_and_lengths():
    """And the same seed is the same trace."""
    trace = phased_trace([Phase(1000, 5.0, 300, 20), Phase(1000, 2.0, 100, 200)], 16, 3)
    first, second = ([turn for turn in trace.turns if (turn.at_s < 1000) is early] for early in (True, False))

    assert trace == phased_trace([Phase(1000, 5.0, 300, 20), Phase(1000, 2.0, 100, 200)], 16, 3)
    assert (len(first), len(second)) == (pytest.approx(5000, rel=0.05), pytest.approx(2000, rel=0.07))
    assert sum(turn.prompt_tokens for turn in first) / len(first) == pytest.approx(300, rel=0.05)
    assert sum(turn.output_tokens for turn in second) / len(second) == pytest.approx(200, rel=0.07)
    assert len({block for turn in trace.turns for block in turn.blocks}) == sum(len(one.blocks) for one in trace.turns)


def test_the_command_shows_each_turn(capsys, tmp_path):
    """When, to what, and what the fleet was then."""
    (tmp_path / "engine.json").write_text('{"prefill_token_s": 5e-4, "step_s": 0.04}')
    typed = "--phase 150:4:2000:20 --prefill 3 --decode 3 --block-size 64 --policy least_loaded --roles auto"
    code = main(["replay", *typed.split(), "--ttft", "3", "--itl", "0.1", "--engine", str(tmp_path / "engine.json")])
    out = capsys.readouterr().out

    assert code == 0
    assert "least_loaded: at 5" in out
    assert "s an engine turns to prefill, from " in out
    assert "s on 4 prefill and 2 decode engines" in out


@pytest.mark.parametrize(
    ("typed", "why"),
    [
        ("--sessions 5 --roles auto", "--roles auto needs --ttft and --itl"),
        ("--sessions 5 --roles auto --ttft 1 --itl 1 --kv-events", "without --kv-events"),
        ("--sessions 5 --phase 1:1:1:1", "give either a trace or --sessions or --phase"),
        ("--phase 1e6:9:1:1", "have about 9,000,000 requests, more than 1,000,000"),
    ],
)
def test_what_cannot_be_replayed_is_said_in_one_sentence(typed, why, capsys):
    """Exit code 2, and what would be right."""
    assert main(["replay", *typed.split()]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("text", ["1:2:3", "1:2:3:x", "1:2:3:9000000"])
def test_a_phase_of_another_form_is_refused(text, capsys):
    """By the parser of the command line."""
    with pytest.raises(SystemExit):
        main(["replay", "--phase", text])

    assert "--phase" in capsys.readouterr().err

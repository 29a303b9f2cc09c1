"""What the settings say about the way of a request."""

from xpyd_proxy.core.routing.request_rules import RequestRules, Timeouts, rules_of
from xpyd_proxy.settings import Settings


def test_the_defaults_are_the_same_in_both_places():
    """Whoever builds a relay by hand gets what an operator gets who chooses nothing."""
    assert rules_of(Settings()) == RequestRules()


def test_every_choice_arrives():
    """Each under another name: a mix-up would show."""
    settings = Settings(
        retries=9,
        prefill_timeout_s=1.0,
        first_token_timeout_s=2.0,
        stream_idle_timeout_s=3.0,
        total_timeout_s=4.0,
        stream_timeout_s=5.0,
        handoff_timeout_s=7.0,
        min_split_prompt_bytes=6,
        decode_only_fallback=False,
        reuse_prompt_tokens=True,
        resume_streams=True,
    )

    assert rules_of(settings) == RequestRules(
        9,
        Timeouts(1.0, 2.0, 3.0, 4.0, 5.0, 7.0),
        6,
        decode_only_fallback=False,
        reuse_prompt_tokens=True,
        resume_streams=True,
    )


def test_a_stream_has_no_limit_for_all_of_it_unless_somebody_sets_one():
    """A whole answer has."""
    assert Timeouts().total_s(streams=True) is None
    assert Timeouts(whole_s=1.0, stream_s=2.0).total_s(streams=True) == 2.0
    assert Timeouts(whole_s=1.0, stream_s=2.0).total_s(streams=False) == 1.0

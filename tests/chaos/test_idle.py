"""An engine that has nothing to do uses next to no CPU: NIXL's progress thread alone would burn a core."""

import pytest

from support.legs import decode, plain, prefill, prompt_of, text_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

BOUND = 0.05  # of a core, for all processes and threads of an engine


def test_an_idle_engine_uses_less_than_a_twentieth_of_a_core(victims, p, d, reference):
    """P and D, as they were started and after a transfer. Time on a CPU, medians of five windows of a second."""
    before = victims.idle
    prompt = prompt_of(990)
    assert text_of(decode(d.spec, prompt, prefill(p.spec, prompt))) == plain(reference, prompt)
    victims.ready()
    victims.note_idle_cores()
    after = victims.idle

    print(f"\nshare of a core (whole engine, its busiest thread): before contact {before}, after {after}")
    assert max(share for shares in (before, after) for share, _ in shares.values()) < BOUND, (before, after)

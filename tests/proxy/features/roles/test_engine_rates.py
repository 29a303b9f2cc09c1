"""What an engine can do, by what it shows while it has little to do."""

from random import Random

import pytest

from pdrelay_proxy.features.roles.engine_rates import DecodeLine, PrefillRate

BASE_S, SLOPE_S, TARGET_S = 0.04, 0.004, 0.08  # 10 streams, and 125 tokens a second


def line_of(streams_per_s, *, noise, seed, looks=40):
    """Return what is learned at so many tokens a second, more or less; the machine is now fast, now slow."""
    line = DecodeLine()
    chance = Random(seed)
    for _ in range(looks):
        line.fade(5.0)
        made = streams_per_s * chance.uniform(0.7, 1.3)
        slowness = 1.0 + chance.uniform(-noise, noise)
        itl_s = BASE_S * slowness / (1.0 - made * SLOPE_S)
        line.add(made * itl_s, itl_s)
    return line


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("made", [15.0, 40.0, 80.0])
def test_an_engine_that_is_now_slow_now_fast_is_not_believed_to_be_full(made, seed):
    """Slower steps make larger batches of the same tokens: that is not what a larger batch costs.

    A line through these points runs through the origin: an engine with 0.7 streams seemed to have room for one.
    """
    found = line_of(made, noise=0.2, seed=seed).tokens_per_s(TARGET_S, None)

    assert found > 0.4 * 125


@pytest.mark.parametrize("made", [40.0, 80.0, 110.0])
def test_the_line_is_found_where_batches_differ(made):
    """Without noise, and at whatever load."""
    found = line_of(made, noise=0.0, seed=1).tokens_per_s(TARGET_S, None)

    assert found == pytest.approx(125, rel=0.35)


@pytest.mark.parametrize("seed", range(20))
def test_an_engine_that_makes_all_it_can_is_believed_to_be_full(seed):
    """Its tokens are about the same in batches of any size: the line is that of its batches, and not one of chance."""
    line = DecodeLine()
    chance = Random(seed)
    for _ in range(12):
        line.fade(5.0)
        batch = chance.uniform(15.0, 32.0)
        line.add(batch, (BASE_S + SLOPE_S * batch) * chance.uniform(0.95, 1.05))

    assert line.tokens_per_s(TARGET_S, None) == pytest.approx(125, rel=0.5)


@pytest.mark.parametrize(("busy", "looks"), [(0.15, 6), (0.02, 6), (1.0, 5)])
def test_the_rate_of_engines_with_little_to_do_is_soon_known(busy, looks):
    """A fleet with too many prefill engines had none for two minutes: 20 s of their work."""
    rate = PrefillRate()
    known = []
    for _ in range(looks):
        known.append(rate.per_s)
        rate.add(5 * busy * 1000, 5 * busy, 5.0)

    assert known == [None] * looks
    assert rate.per_s == pytest.approx(1000)


def test_much_work_outweighs_what_little_work_has_shown():
    """Prompts of a few tokens seem to be slow: a step takes its time. It must not be believed for long."""
    rate = PrefillRate()
    for _ in range(20):
        rate.add(10, 0.04, 5.0)
    assert rate.per_s == pytest.approx(250)
    rate.add(5 * 1500, 5.0, 5.0)

    assert rate.per_s == pytest.approx(1500, rel=0.25)


def test_nothing_was_computed():
    """However long one looks."""
    rate = PrefillRate()
    for _ in range(100):
        rate.add(0.0, 0.0, 5.0)

    assert rate.per_s is None

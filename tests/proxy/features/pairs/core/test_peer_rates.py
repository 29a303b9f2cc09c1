"""How fast KV moves between engines."""

from pdrelay_proxy.features.pairs.core.peer_rates import PeerRates


def test_the_rate_is_that_of_what_moved_since_the_last_look():
    """A link that has become slow must not hide behind what it was for days; an engine that began anew counts anew."""
    rates = PeerRates()
    seen = [
        rates.rates_of("d", {"p": moved}) for moved in ((9e9, 9.0), (9e9 + 1e6, 10.0), (9e9 + 1e6, 10.0), (5e6, 1.0))
    ]

    assert seen == [{"p": 1e9}, {"p": 1e6}, {}, {"p": 5e6}]

"""Which lease is a transfer's, and which transfers nobody will come for."""

import pytest

from pdrelay_connector.core.ids import RequestId
from pdrelay_connector.core.lease.transfer_names import MAX_ABANDONED, TransferNames, abandoned_transfer, transfer_of
from pdrelay_connector.core.messages import MAX_ID
from pdrelay_connector.errors import InvalidKvParams

A, B = RequestId("a"), RequestId("b")


def test_a_lease_is_found_by_its_transfer_until_it_ends():
    """Whoever abandons it later finds none."""
    names = TransferNames()
    names.lend("t", A)
    assert names.abandon("t") == (A,)
    names.ended(A)

    assert names.abandon("t") == ()
    names.ended(B)  # one without a name


def test_the_second_lease_of_a_name_outlives_the_first():
    """A router uses a name once; whoever does not must not end the engine."""
    names = TransferNames()
    names.lend("t", A)
    names.lend("t", B)
    names.ended(A)

    assert names.abandon("t") == (B,)
    names.ended(B)
    assert names.abandon("t") == ()


def test_leases_of_one_name_end_in_any_order_and_all_of_them_are_found():
    """One completion request with several prompts names one transfer for all of them."""
    names = TransferNames()
    for lease in (A, B):
        names.lend("t", lease)
    assert names.abandon("t") == (A, B)
    names.ended(B)
    assert names.abandon("t") == (A,)
    names.ended(A)

    assert names.abandon("t") == ()


def test_an_abandoned_transfer_is_known_when_it_is_computed():
    """Once: what is remembered for ever would be a leak."""
    names = TransferNames()
    assert names.abandon("t") == ()

    assert [names.take_abandoned("t"), names.take_abandoned("t"), names.take_abandoned("u")] == [True, False, False]


def test_abandoned_transfers_are_bounded():
    """The oldest is forgotten: its lease ends by itself."""
    names = TransferNames()
    for number in range(MAX_ABANDONED + 1):
        names.abandon(str(number))

    assert not names.take_abandoned("0")
    assert names.take_abandoned("1")
    assert names.take_abandoned(str(MAX_ABANDONED))


@pytest.mark.parametrize("name", ["", "x" * (MAX_ID + 1), 5, ["t"], "nul\0byte"])
def test_what_is_no_name(name):
    """It is refused where it is said on purpose, and counts for nothing where a prefill has it."""
    with pytest.raises(InvalidKvParams, match="abandoned_transfer_id must be printable text"):
        abandoned_transfer({"abandoned_transfer_id": name})
    assert transfer_of({"transfer_id": name}) is None


def test_other_requests_abandon_nothing():
    """Most say nothing of transfers."""
    assert abandoned_transfer({"transfer_id": "t"}) is None
    assert transfer_of({}) is None
    assert transfer_of({"transfer_id": "t"}) == "t"

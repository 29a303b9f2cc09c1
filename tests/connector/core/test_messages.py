"""What engines say to each other, and what they must survive hearing."""

import contextlib
import typing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay_connector.core.ids import BlockId, ConnId, EngineId, PartId, RequestId
from pdrelay_connector.core.messages import (
    HASH_BYTES,
    MAX_BLOCKS,
    MAX_DIGEST,
    MAX_FRAME,
    MAX_GROUPS,
    MAX_ID,
    MAX_IDS,
    MAX_PART,
    MAX_PROMPT,
    MAX_RANKS,
    MAX_REASON,
    MAX_UNAUTHENTICATED_FRAME,
    PROTOCOL,
    CancelPushes,
    Challenge,
    CopyEnded,
    CopyIn,
    CopyOut,
    DropLeases,
    Examination,
    FenceResult,
    FindPrefix,
    HeartbeatReply,
    LeasesLost,
    LentBlocks,
    Message,
    Objection,
    PartRefused,
    PartStaged,
    PeerGone,
    PeerMemory,
    PrefixFound,
    PushAborted,
    PushDone,
    PushStalled,
    PushStopped,
    PushWritten,
    RankMemory,
    Reachable,
    ReadDone,
    ReadsStarted,
    Refusal,
    RegisterPush,
    RenewLeases,
    ServerProof,
    StagePart,
    StartPush,
    StopPush,
    Welcome,
    WorkerHello,
    WriteStalled,
    decode,
    encode,
)
from pdrelay_connector.errors import ProtocolViolation
from support.engines import FINGERPRINT, HELLO, changed, rank_info

ID = RequestId("cmpl-5f0c-0-1a2b3c4d")
WELCOME = Welcome(PROTOCOL, EngineId("p0"), FINGERPRINT, (rank_info("p0"), rank_info("p0", rank=1)))
REGISTER = RegisterPush(ID, RequestId("t-1"), "digest", (LentBlocks(12, 20, (BlockId(7), BlockId(9))),))
EXAMPLES = [
    Challenge(PROTOCOL, b"\0" * 32),
    HELLO,
    ServerProof(b"proof"),
    WELCOME,
    Refusal("no"),
    Reachable("10.0.0.1", 5700),
    FindPrefix(ID, b"\1\0\0\0" * 40, "a salt"),
    PrefixFound(ID, RequestId("cached-1"), 16, (BlockId(3), BlockId(9))),
    RenewLeases((ID, RequestId("é"))),
    LeasesLost(()),
    ReadsStarted((ID,)),
    ReadDone(ID, RequestId("d"), 1, 2),
    FenceResult(ID, held=True),
    DropLeases((ID,)),
    Objection("its weights are 'a', ours are 'b'; they must be equal"),
    HeartbeatReply(),
    RankMemory(rank_info("d0")),
    REGISTER,
    PushDone(ID, held=False),
    CancelPushes((ID,)),
    PushStopped(ID, "why"),
    PushStalled(ID, "why"),
    WorkerHello(1, b"token"),
    PeerMemory(ConnId(3), rank_info("d0")),
    StartPush(ConnId(3), REGISTER),
    StopPush(ConnId(3), ID),
    PeerGone(ConnId(3)),
    PushWritten(ConnId(3), ID),
    PushAborted(ConnId(3), ID, "why"),
    WriteStalled(ConnId(3), ID, "why"),
    StagePart(RequestId("p"), ID, 1, 2, 3, ((BlockId(7), BlockId(9)), ())),
    PartStaged(ID, 3, ((BlockId(1), BlockId(2)), ())),
    PartRefused(ID, 3, "why"),
    CopyOut(PartId(1), ((BlockId(7),), ()), ((BlockId(1),), ())),
    CopyIn(PartId(2), ((BlockId(1),), ()), ((BlockId(7),), ())),
    CopyEnded(PartId(2), ""),
    Examination(b"content"),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_what_is_sent_is_received(message):
    """Of every kind of message."""
    assert decode(encode(message)) == message


def test_every_kind_of_message_has_an_example():
    """A new kind has to be added above."""
    assert {type(example) for example in EXAMPLES} == set(typing.get_args(Message))


@given(st.binary(max_size=200))
def test_garbage_is_a_violation_and_nothing_else(data):
    """A stranger's bytes must not end the thread that keeps everybody's leases."""
    with contextlib.suppress(ProtocolViolation):
        decode(data)


@given(st.sampled_from(EXAMPLES), st.data())
def test_a_damaged_message_is_a_violation_or_another_message(message, data):
    """Most garbage is cut off early; this kind looks right for longer."""
    damaged = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolViolation):
        decode(damaged[: data.draw(st.integers(0, len(damaged)))])


def packed(kind, **fields):
    return msgspec.msgpack.encode({"type": kind, **fields})


LENT = {"start": 0, "stop": 4, "blocks": [1]}


def test_the_registration_that_is_spoilt_below_is_sound():
    """Otherwise it would be refused for another reason."""
    data = packed("register_push", reader="d", request="t", prompt=None, groups=[LENT])

    assert decode(data) == RegisterPush(RequestId("d"), RequestId("t"), None, (LentBlocks(0, 4, (BlockId(1),)),))


@pytest.mark.parametrize(
    "data",
    [
        b"\x81\xa4type\xa1\xff",  # a name that is not UTF-8
        packed("renew_leases", requests=["x"]).replace(b"\xa1x", b"\xa1\xff"),
        b"\x82\xa4type\xa5renew\xa1x" + b"\x91" * 100_000,  # nested deeper than any stack
        packed("read_done", request="a", reader="d", rank=0, ranks=0),
        packed("read_done", request="a", reader="d", rank=-1, ranks=2),
        packed("read_done", request="a", reader="d", rank=0, ranks=MAX_RANKS + 1),
        packed("read_done", request="a", reader="d" * (MAX_ID + 1), rank=0, ranks=1),
        packed("read_done", request="a", reader="d", rank=2**63, ranks=2**64 - 1),
        packed("renew_leases", requests=["a"] * (MAX_IDS + 1)),
        packed("drop_leases", requests=[1]),
        packed("register_push", reader="d", request="t", prompt=None, groups=[]),
        packed("register_push", reader="d", request="t", prompt=None, groups=[LENT] * (MAX_GROUPS + 1)),
        packed("register_push", reader="d", request="t", prompt=None, groups=[{**LENT, "start": -1}]),
        packed("register_push", reader="d", request="t", prompt=None, groups=[{**LENT, "stop": MAX_PROMPT + 1}]),
        packed("register_push", reader="d", request="t", prompt=None, groups=[{**LENT, "blocks": [-1]}]),
        packed("register_push", reader="d", request="t", prompt=None, groups=[{**LENT, "blocks": [MAX_BLOCKS]}]),
        packed("register_push", reader="d", request="t", prompt="x" * (MAX_DIGEST + 1), groups=[LENT]),
        packed("register_push", reader="d" * (MAX_ID + 1), request="t", prompt=None, groups=[LENT]),
        packed("stage_part", request="t", reader="d", rank=0, ranks=0, part=0, groups=[[1]]),
        packed("stage_part", request="t", reader="d", rank=0, ranks=1, part=-1, groups=[[1]]),
        packed("stage_part", request="t", reader="d", rank=0, ranks=1, part=0, groups=[]),
        packed("stage_part", request="t", reader="d", rank=0, ranks=1, part=0, groups=[[1] * (MAX_PART + 1)]),
        packed("stage_part", request="t", reader="d", rank=0, ranks=1, part=0, groups=[[1]] * (MAX_GROUPS + 1)),
        packed("copy_ended", number=2**63, reason=""),
        packed("push_done", reader="d", held="yes"),
        packed("cancel_pushes", readers=["d"] * (MAX_IDS + 1)),
        packed("push_stopped", reader="d", reason="x" * (MAX_REASON + 1)),
        packed("worker_hello", rank=0, token=b"x" * 65),
        packed("worker_hello", rank=MAX_RANKS, token=b""),
        packed("push_written", peer="1", reader="d"),
        packed("tomorrow"),
    ],
    ids=lambda data: repr(data[:30] + data[-30:]),
)
def test_hostile_messages_are_violations(data):
    """Each of these would raise something else, or fill a table, further in."""
    with pytest.raises(ProtocolViolation, match=f"protocol {PROTOCOL}"):
        decode(data)


@pytest.mark.parametrize(
    "change",
    [
        {"memory": "FILE"},
        {"device": -1},
        {"device": 2**40},
        {"rank": -1},
        {"ranks": 0},
        {"ranks": MAX_RANKS + 1},
        {"regions": ()},
        {"regions": (changed(rank_info("p0").regions[0], base=-1),)},
        {"regions": (changed(rank_info("p0").regions[0], width=0),)},
        {"regions": (changed(rank_info("p0").regions[0], heads=0),)},
        {"regions": (changed(rank_info("p0").regions[0], tokens=0),)},
        {"regions": (changed(rank_info("p0").regions[0], rows=0),)},
        {"regions": (changed(rank_info("p0").regions[0], parts=0),)},
        {"regions": (changed(rank_info("p0").regions[0], parts=2**40),)},
        {"regions": (changed(rank_info("p0").regions[0], part_stride=-1),)},
        {"regions": (changed(rank_info("p0").regions[0], row_stride=-1),)},
        {"regions": (changed(rank_info("p0").regions[0], group=MAX_GROUPS),)},
        {"regions": (changed(rank_info("p0").regions[0], all_heads=0),)},
        {"regions": (changed(rank_info("p0").regions[0], count=0),)},
        {"regions": (changed(rank_info("p0").regions[0], count=MAX_BLOCKS + 1),)},
    ],
    ids=repr,
)
def test_a_welcome_that_would_upset_nixl_is_a_violation(change):
    """What the transfer thread gets to see has been checked."""
    welcome = changed(WELCOME, ranks=(changed(rank_info("p0"), **change),))

    with pytest.raises(ProtocolViolation):
        decode(encode(welcome))


def test_the_longest_heartbeat_fits_into_a_frame():
    """Otherwise the peer would close the connection, and with it every lease."""
    longest = RequestId("\U0001f600" * MAX_ID)

    for kind in (RenewLeases, LeasesLost, DropLeases, CancelPushes):
        assert len(encode(kind((longest,) * MAX_IDS))) <= MAX_FRAME
    assert len(encode(ReadDone(longest, longest, MAX_RANKS - 1, MAX_RANKS))) <= MAX_FRAME


def test_the_largest_part_fits_into_a_frame():
    """Staging would otherwise end with the connection."""
    longest = RequestId("\U0001f600" * MAX_ID)
    blocks = ((BlockId(MAX_BLOCKS - 1),) * MAX_PART,) * MAX_GROUPS

    assert len(encode(CopyOut(PartId(2**63 - 1), blocks, blocks))) <= MAX_FRAME
    assert len(encode(CopyIn(PartId(2**63 - 1), blocks, blocks))) <= MAX_FRAME
    assert len(encode(StagePart(longest, longest, MAX_RANKS - 1, MAX_RANKS, MAX_BLOCKS, blocks))) <= MAX_FRAME
    assert len(encode(PartStaged(longest, MAX_BLOCKS, blocks))) <= MAX_FRAME


def test_the_longest_hello_is_within_the_unauthenticated_limit():
    """With the most ranks, the longest names and two proofs."""
    hello = changed(
        HELLO, engine=EngineId("\U0001f600" * MAX_ID), expects=EngineId("\U0001f600" * MAX_ID), host="x" * 255,
        proofs=(b"\0" * 32,) * 2, workers=(b"\0" * HASH_BYTES,) * MAX_RANKS,
    )  # fmt: skip

    assert len(encode(hello)) <= MAX_UNAUTHENTICATED_FRAME

"""One file, several hands."""

import resource
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.health import HealthState
from pdrelay_proxy.core.fleet.target import BY_HAND, EngineSource, Origin, Target, Wanted
from pdrelay_proxy.core.model import InstanceId, Role
from pdrelay_proxy.core.workers.instance_ids import Verb
from pdrelay_proxy.errors import AlreadyKnown, IdLogBusy
from pdrelay_proxy.io.discovery.reconciler import Reconciler
from pdrelay_proxy.io.request_path.id_log import InstanceIdLog
from pdrelay_proxy.io.request_path.shared_registry import SharedRegistry
from pdrelay_proxy.settings import Settings

pytestmark = pytest.mark.processes


D0, D1 = InstanceId("decode-0"), InstanceId("decode-1")
A, B = Address("http", "a", 1), Address("http", "b", 1)
STORED = Origin(EngineSource.STORE, 1, Wanted(Role.DECODE, Target.parse("a:1")))


def worker(folder, *addresses):
    """A worker that has begun with these engines."""
    registry = SharedRegistry(Settings(), InstanceIdLog(folder / "ledger"))
    for address in addresses:
        registry.add(Role.DECODE, address)
    registry.begin(now=0.0)
    return registry


HOLDER = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"


@contextmanager
def held(folder):
    """Another process has the turn while the block lasts, as a worker that was stopped in it."""
    arguments = [sys.executable, "-c", HOLDER, str(folder / "ledger")]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        yield
        holder.communicate()


def test_a_worker_that_is_stopped_while_it_writes_does_not_stop_the_others(tmp_path):
    """They waited for the file's lock on the loop that serves requests, without a bound."""
    zero, one = worker(tmp_path), worker(tmp_path)
    zero.add(Role.DECODE, A, origin=STORED)
    with held(tmp_path):
        assert one.add(Role.DECODE, A, origin=STORED).id == D0  # all of them know it
        zero.drain(D0, now=1.0)
        zero._ledger.say(Verb.DRAIN, D0)
        with pytest.raises(IdLogBusy, match="another worker of this router holds"):
            zero.add(Role.DECODE, B)
        one.follow(now=1.0)
        assert one.member(D0).life.state is HealthState.STARTING
    zero.follow(now=2.0)
    one.follow(now=2.0)

    assert one.member(D0).life.state is HealthState.DRAINING
    assert [each.add(Role.DECODE, B).id for each in (zero, one)] == [D1, D1]


def test_an_engine_that_could_not_be_named_is_added_later(tmp_path):
    """By the next look at all engines after the log is free, though no source says anything new."""
    registry = worker(tmp_path)
    reconciler = Reconciler(registry, [EngineSource.STORE], lambda: 0.0)
    with held(tmp_path):
        reconciler.view(EngineSource.STORE, [STORED.wanted])
        assert [*reconciler.reconcile(), *registry.members()] == [None]
        list(reconciler.reconcile())
        assert not registry.members()
    list(reconciler.reconcile())

    assert [member.instance.id for member in registry.members()] == [D0]


def sleeps():
    """How often this thread has waited for something."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def test_hundreds_of_changes_behind_a_worker_that_is_stopped_wait_once(tmp_path, caplog):
    """Each waited for 4 ms on the loop that serves requests: 2,000 engines that came, or went, for eight seconds."""
    wanted = [Wanted(Role.DECODE, Target.parse(f"h{number}:1")) for number in range(600)]
    zero, one = worker(tmp_path), worker(tmp_path)
    reconciler = Reconciler(zero, [EngineSource.STORE], lambda: 0.0)
    reconciler.view(EngineSource.STORE, wanted[:300])
    with held(tmp_path):
        before = sleeps()
        reconciler.view(EngineSource.STORE, wanted[300:])
        list(reconciler.reconcile())
        zero.follow(now=1.0)
        assert sleeps() - before < 100
        assert zero.members() == ()
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [text.rpartition(": ")[2] for text in said] == [
        "the other workers hear later what is done here",
        "h300:1 is added later, and what else is new",
    ]

    list(reconciler.reconcile())
    assert [member.instance.id for member in zero.members()] == [f"decode-{number}" for number in range(300, 600)]
    one.follow(now=2.0)
    assert one.add(Role.DECODE, Address("http", "h599", 1), origin=STORED).id == "decode-599"
    assert one.add(Role.DECODE, Address("http", "h0", 1), origin=STORED).id == "decode-600"


def test_of_an_engine_with_ranks_all_are_added_later_or_none(tmp_path):
    """A worker that is stopped has named the first of them; an engine that lacks some is not looked at again."""
    wanted = Wanted(Role.DECODE, Target.parse("a:1#dp=2"))
    other, registry = worker(tmp_path), worker(tmp_path)
    other.add(Role.DECODE, A, rank=0, origin=Origin(EngineSource.STORE, 1, wanted))
    reconciler = Reconciler(registry, [EngineSource.STORE], lambda: 0.0)
    with held(tmp_path):
        reconciler.view(EngineSource.STORE, [wanted])
        assert not registry.members()
    list(reconciler.reconcile())

    assert [member.instance.rank for member in registry.members()] == [0, 1]
    assert [member.instance.id for member in registry.members()] == [D0, D1]
    assert [verb for verb, _ in other._ledger.news()] == [Verb.NAME]  # nothing was given up


def leave_by_hand(registry):
    """An operator removes what the settings name."""
    registry.remove(D0, now=1.0)
    registry._ledger.say(Verb.REMOVE, D0)


@pytest.mark.parametrize(
    ("origin", "leave"),
    [
        (STORED, lambda registry: registry.remove(D0, now=1.0)),
        (BY_HAND, lambda registry: registry.retire(D0, now=1.0)),
        (BY_HAND, leave_by_hand),
    ],
    ids=["store", "settings", "operator"],
)
def test_what_was_not_written_yet_never_hits_the_engine_that_comes_to_the_place(tmp_path, origin, leave):
    """It came back under the id of the one that had gone: the late line ended it, or took its id away."""
    zero, one = worker(tmp_path), worker(tmp_path)
    for registry in (zero, one):
        registry.add(Role.DECODE, A, origin=origin)
    with held(tmp_path):
        leave(zero)
        with pytest.raises(IdLogBusy):
            zero.add(Role.DECODE, A, now=1.0, origin=origin)
        one.retire(D0, now=1.0)
    assert [each.add(Role.DECODE, A, now=2.0, origin=origin).id for each in (zero, one)] == [D1, D1]
    for registry in (zero, one):
        registry.follow(now=3.0)

    assert {D1} == {name for each in (zero, one) for name in ids(each, HealthState.STARTING)}
    assert ids(worker(tmp_path), HealthState.STARTING) == []  # it has heard of no engine yet
    assert worker(tmp_path).add(Role.DECODE, A, origin=origin).id == D1


def ids(registry, state):
    """The engines in a state."""
    return [member.instance.id for member in registry.members() if member.life.state is state]


def test_a_line_of_which_half_is_written_is_read_when_it_is_whole(tmp_path):
    """Who reads takes no lock."""
    ledger = InstanceIdLog(tmp_path / "ledger")
    line = b'["name","decode a"]\n'
    with (tmp_path / "ledger").open("ab", buffering=0) as file:
        file.write(line[:9])
        assert ledger.news() == []
        file.write(line[9:])

    assert ledger.news() == [(Verb.NAME, "decode a")]


@pytest.mark.parametrize("length", [1, 9, 18])
def test_half_a_line_of_a_worker_that_died_spoils_no_other_line(tmp_path, length):
    """The next line was glued to it: who had written that read its end again, and the others lost all behind it."""
    ledgers = [InstanceIdLog(tmp_path / "ledger") for _ in range(2)]
    ledgers[0].number("decode a", anew=True)
    with (tmp_path / "ledger").open("ab", buffering=0) as file:
        file.write(b'["remove","decode-0"]\n'[:length])
    ledgers[1].news()
    ledgers[0].say(Verb.DRAIN, D0)
    ledgers[0].number("decode b", anew=True)

    assert ledgers[0].news() == []
    assert ledgers[1].news() == [(Verb.DRAIN, D0), (Verb.NAME, "decode b")]
    for ledger in (*ledgers, InstanceIdLog(tmp_path / "ledger")):
        ledger.news()
        assert ledger.number("decode b", anew=True) == 1
        assert ledger.roster.order(D0) is Verb.DRAIN


@contextmanager
def full(folder, room):
    """So many bytes more can be written to the log while the block lasts."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((folder / "ledger").stat().st_size + room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("room", [0, 9, 20])  # bytes: with 20 the line break alone is missing
def test_a_line_for_which_there_is_no_room_is_written_when_there_is(tmp_path, room):
    """It was lost for the other workers, or half of it was taken for the whole."""
    mine, other = InstanceIdLog(tmp_path / "ledger"), InstanceIdLog(tmp_path / "ledger")
    mine.number("decode a", anew=True)
    other.news()
    with full(tmp_path, room):
        mine.say(Verb.DRAIN, D0)
        with pytest.raises(IdLogBusy, match="cannot be written"):
            mine.number("decode b", anew=True)
        assert other.news() == []
    assert mine.number("decode b", anew=True) == 1

    assert {*other.news()} == {(Verb.DRAIN, D0), (Verb.NAME, "decode b")}
    assert other.news() == []
    assert InstanceIdLog(tmp_path / "ledger").number("decode b", anew=True) == 1


def test_a_full_disk_is_no_fault_of_an_engine_and_said_once(tmp_path, caplog):
    """Known engines serve on; new ones are added, and orders heard, once there is room."""
    zero, one = worker(tmp_path), worker(tmp_path)
    for registry in (zero, one):
        registry.add(Role.DECODE, A)
    reconciler = Reconciler(zero, [EngineSource.STORE], lambda: 0.0)
    with full(tmp_path, 9):
        zero.drain(D0, now=1.0)
        zero._ledger.say(Verb.DRAIN, D0)
        reconciler.view(EngineSource.STORE, [Wanted(Role.DECODE, Target.parse(f"b{number}:1")) for number in range(5)])
        for second in range(40):
            list(reconciler.reconcile())
            zero.follow(now=1.0 + second)
            one.follow(now=1.0 + second)
        assert one.member(D0).life.state is HealthState.STARTING
        said = [record.getMessage() for record in caplog.records if record.levelname != "INFO"]
        assert [text.rpartition(": ")[2] for text in said] == [
            "the other workers hear later what is done here",
            "b0:1 is added later, and what else is new",
        ]
    list(reconciler.reconcile())
    one.follow(now=50.0)

    assert len(zero.members()) == 6
    assert one.member(D0).life.state is HealthState.DRAINING


def test_ten_hands_at_once_give_every_engine_one_number(tmp_path):
    """The kernel's lock says whose turn it is."""
    found = []

    def work():
        ledger = InstanceIdLog(tmp_path / "ledger")
        found.append([ledger.number(f"decode engine-{number}", anew=False) for number in range(50)])

    threads = [threading.Thread(target=work) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(found) == 10
    assert all(sorted(numbers) == list(range(50)) for numbers in found)
    assert all(numbers == found[0] for numbers in found)


def test_one_does_not_hear_oneself(tmp_path):
    """What one has ordered has been done here already, and is not done again later."""
    mine, other = InstanceIdLog(tmp_path / "ledger"), InstanceIdLog(tmp_path / "ledger")
    mine.number("decode a", anew=False)
    mine.say(Verb.DRAIN, D0)

    assert mine.news() == []
    assert other.news() == [(Verb.NAME, "decode a"), (Verb.DRAIN, D0)]
    assert other.news() == []


def test_an_order_between_the_settings_and_the_first_look_is_not_missed(tmp_path):
    """A worker is built before it runs."""
    late = SharedRegistry(Settings(), InstanceIdLog(tmp_path / "ledger"))
    ledger = InstanceIdLog(tmp_path / "ledger")
    for address in (A, B):
        late.add(Role.DECODE, address)
    for verb, name in ((Verb.MOVE, D0), (Verb.DRAIN, D1), (Verb.UNDRAIN, D1)):
        ledger.say(verb, name)
    late.begin(now=1.0)

    assert list(late.moving) == [D0]
    assert [member.life.state for member in late.members()] == [HealthState.DRAINING, HealthState.STARTING]


def test_a_worker_that_is_started_later_does_not_bring_back_what_was_taken_out_by_hand(tmp_path):
    """Its settings still name it."""
    worker(tmp_path, A, B)
    InstanceIdLog(tmp_path / "ledger").say(Verb.REMOVE, D0)

    assert [member.instance.id for member in worker(tmp_path, A, B).members()] == [D1]


def test_an_engine_that_was_taken_out_by_hand_comes_back_under_another_id(tmp_path):
    """When the settings name it anew, that is an operator's word, too; both workers find the same id for it."""
    zero, one = worker(tmp_path, A), worker(tmp_path, A)
    InstanceIdLog(tmp_path / "ledger").say(Verb.REMOVE, D0)
    for registry in (zero, one):
        registry.follow(now=1.0)
        assert registry.add(Role.DECODE, A).id == D1
    for registry in (zero, one):
        registry.follow(now=2.0)
        assert [member.instance.id for member in registry.members()] == [D1]


def test_one_that_leaves_the_settings_and_comes_again_has_another_id(tmp_path):
    """While the one of before still finishes what it has."""
    zero, one = worker(tmp_path, A), worker(tmp_path, A)
    for registry in (zero, one):
        registry.retire(D0, now=1.0)
    assert [registry.add(Role.DECODE, A, now=2.0).id for registry in (zero, one)] == [D1, D1]
    for registry in (zero, one):
        registry.follow(now=3.0)
        assert [member.instance.id for member in registry.members()] == [D0, D1]


def test_a_worker_that_has_missed_that_an_engine_went_and_came_follows(tmp_path):
    """Its store shows it the same engine as before; but to the others it is a new one."""
    zero, one = worker(tmp_path), worker(tmp_path)
    for registry in (zero, one):
        assert registry.add(Role.DECODE, A, origin=STORED).id == D0
    one.member(D0).life.drain(now=0.5)
    zero.remove(D0, now=1.0)
    assert zero.add(Role.DECODE, A, now=1.0, origin=STORED).id == D1
    one.follow(now=1.1)

    (member,) = one.members()
    assert (member.instance.id, member.life.state, member.origin) == (D1, HealthState.STARTING, STORED)
    zero.follow(now=1.2)
    assert [member.instance.id for member in zero.members()] == [D1]


def test_one_that_went_and_came_by_hand_has_its_new_id_only_with_its_new_entry(tmp_path):
    """A worker gave the id to its old entry first, and refused orders for it; with the new entry, all got another."""
    old, new = (Wanted(Role.DECODE, Target.parse("a:1"), added=added) for added in ("1", "2"))
    zero, one = worker(tmp_path), worker(tmp_path)
    sees = [Reconciler(registry, [EngineSource.STORE], lambda: 0.0) for registry in (zero, one)]
    for reconciler in sees:
        reconciler.view(EngineSource.STORE, [old])
    for view in ([], [new]):
        sees[0].view(EngineSource.STORE, view)
    one.follow(now=1.0)
    assert [(member.instance.id, member.origin.wanted) for member in one.members()] == [(D0, old)]

    sees[1].view(EngineSource.STORE, [new])
    for registry in (zero, one):
        registry.follow(now=2.0)
        assert [(member.instance.id, member.origin.wanted) for member in registry.members()] == [(D1, new)]


def test_an_engine_that_went_and_came_and_was_taken_out_by_hand_does_not_come_back(tmp_path):
    """A worker that had missed it all took the new one for one that has come, and gave it the next id."""
    zero, one = worker(tmp_path, A), worker(tmp_path, A)
    zero.retire(D0, now=1.0)
    assert zero.add(Role.DECODE, A, now=1.0).id == D1
    zero.remove(D1, now=1.0)
    zero._ledger.say(Verb.REMOVE, D1)
    one.follow(now=1.1)

    assert one.members() == ()
    assert one._ledger.roster.order(D1) is Verb.REMOVE


def test_an_engine_that_went_and_came_and_went_is_left_to_its_source(tmp_path):
    """A worker gave it the next id; without a turn for that, it lost the engine, and all orders behind that line."""
    zero, one = worker(tmp_path, A, B), worker(tmp_path, A, B)
    zero.retire(D0, now=1.0)
    name = zero.add(Role.DECODE, A, now=1.0).id
    zero.retire(name, now=1.0)
    zero._ledger.say(Verb.DRAIN, D1)
    with held(tmp_path):
        one.follow(now=1.1)
    one.follow(now=1.2)

    assert [member.instance.id for member in one.members()] == [D0, D1]
    assert one.member(D1).life.state is HealthState.DRAINING


def test_an_address_that_is_known_is_refused_as_ever(tmp_path):
    """And the numbers go on."""
    zero = worker(tmp_path, A)
    with pytest.raises(AlreadyKnown):
        zero.add(Role.DECODE, A, origin=STORED)

    assert zero.add(Role.PREFILL, A).id == "prefill-0"

"""Looking at all engines again and again."""

import asyncio

import pytest

from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.fleet.engine_metrics import Numbers
from pdrelay_proxy.core.fleet.health import HealthState
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.fleet.target import Target
from pdrelay_proxy.core.model import RequestId, Role
from pdrelay_proxy.core.protocol.fault_table import Failure
from pdrelay_proxy.core.protocol.push import EngineMode
from pdrelay_proxy.io.probes.checks import ProbeFailed
from pdrelay_proxy.io.probes.prober import DRAIN_IDLE_S, HUNG_S, Prober
from pdrelay_proxy.settings import Settings
from support.sim import until_async
from support.simulated_loop import in_simulated_time


class Engines:
    """Answers what the test says, and counts."""

    def __init__(self):
        self.facts = EngineCapabilities(frozenset({"m"}), "0.32")
        self.shown = Numbers(
            EngineCapabilities(connector="pdrelay", protocol="4", fingerprint="0123456789abcdef", mode=EngineMode.PUSH),
            leases=2,
        )
        self.sick = None
        self.looks = self.whole_looks = self.readings = self.at_once = self.most_at_once = 0

    async def probe(self, instance, *, is_whole):
        self.looks += 1
        self.whole_looks += is_whole
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0.001)
        self.at_once -= 1
        if self.sick is not None:
            raise self.sick
        return self.facts if is_whole else EngineCapabilities()

    async def numbers(self, instance):
        self.readings += 1
        return self.shown


@pytest.fixture
def registry():
    return Registry()


@pytest.fixture
def engines():
    return Engines()


def now():
    return asyncio.get_running_loop().time()


def prober(registry, engines, give_up=None, *, drain_idle_s=DRAIN_IDLE_S, hung_s=HUNG_S, **rhythm):
    more = {"drain_idle_s": drain_idle_s, "hung_s": hung_s} | ({} if give_up is None else {"give_up": give_up})
    return Prober(registry, engines, Settings(**rhythm), now, lambda: 0.5, **more)


def add(registry, role=Role.DECODE, port=1):
    return registry.member(registry.add(role, Address("http", "h", port), now=0.0).id)


async def test_an_engine_is_looked_at_at_once_and_again(registry, engines):
    """It joins with the first look; what it is, and its connector, is known from then on."""
    member = add(registry)
    async with prober(registry, engines, health_check_interval_s=0.1).running():
        await until_async(lambda: engines.looks >= 2)

    assert member.life.state is HealthState.HEALTHY
    assert member.facts == EngineCapabilities(
        frozenset({"m"}), "0.32", "pdrelay", EngineMode.PUSH, protocol="4", fingerprint="0123456789abcdef"
    )
    assert engines.readings == 1


async def test_an_engine_that_no_request_reached_is_asked_anew_though_it_missed_no_probe(registry, engines):
    """It may have been restarted between two probes: with another connector, other files, other adapters."""
    members = [add(registry, port=number + 1) for number in range(100)]
    async with prober(registry, engines, health_check_interval_s=0.2).running():
        await until_async(lambda: engines.readings == 100)
        engines.facts = EngineCapabilities(frozenset({"m", "x"}), "0.33")
        engines.shown = Numbers(EngineCapabilities(connector="nixl"))
        members[7].life.failed(RequestId("r"), Failure.UNREACHABLE, now=now())
        looks = engines.looks
        await until_async(lambda: engines.looks >= looks + 150)

    assert engines.readings == 101
    assert members[7].facts.models == {"m", "x"}
    assert (members[7].facts.connector, members[7].facts.fingerprint) == ("nixl", None)


async def test_engines_that_are_alike_are_told_of_together(registry, engines, caplog):
    """And once: a rollout of two pools of 20 has 400 pairs of two kinds; an engine whose KV was refused is its own."""
    # a look tells nothing, however late it comes
    engines.facts, engines.shown = EngineCapabilities(), Numbers(EngineCapabilities())
    for number in range(20):
        for role, revision in ((Role.DECODE, "a"), (Role.PREFILL, "b")):
            registry.learn(add(registry, role, number + 1).instance.id, EngineCapabilities(revision=revision))
    for number, engine_id in enumerate(("e1", "e2"), start=30):
        prefill = add(registry, Role.PREFILL, number)
        registry.learn(prefill.instance.id, EngineCapabilities(revision="a", engine_id=engine_id))
    registry.learn(registry.known(Role.DECODE)[3].id, EngineCapabilities(incompatible=frozenset({"e2"})))
    async with prober(registry, engines, health_check_interval_s=0.05).running():
        await until_async(lambda: engines.looks >= 100)

    lines = [record.message for record in caplog.records if "shares no request" in record.message]
    assert sorted(lines) == [
        "decode-0 shares no request with prefill-0: the revision is b there and a here",
        "decode-3 shares no request with prefill-0: the revision is b there and a here",
        "decode-3 shares no request with prefill-21: it has refused that one's KV cache, and its log says why",
    ]


async def test_that_slices_are_apart_is_what_was_asked_for(engines, caplog):
    """Hundreds of slices are tens of thousands of pairs that nobody wants to read of; within a slice they are told."""
    registry = Registry(pairs_within=lambda name: name)
    for number in range(1, 41):
        for role in Role:
            revision = "b" if (number, role) == (40, Role.DECODE) else "a"
            target = Target.parse(f"h:{number}#revision={revision}&slice=s{number}")
            registry.add_target(role, target, now=0.0)
    async with prober(registry, engines, health_check_interval_s=0.05).running():
        await until_async(lambda: engines.looks >= 80)

    lines = [record.message for record in caplog.records if "shares no request" in record.message]
    assert lines == ["decode-39 shares no request with prefill-39: the revision is a there and b here"]


async def test_an_engine_that_falls_ill_breaks_and_comes_back(registry, engines):
    """Without a single request; what it is now is read anew."""
    member = add(registry)
    async with prober(registry, engines, health_check_interval_s=0.05).running():
        await until_async(lambda: member.life.state is HealthState.HEALTHY)
        engines.sick = ProbeFailed("cannot be reached")
        await until_async(lambda: member.life.state is HealthState.EJECTED)
        assert member.life.why == "cannot be reached"
        engines.sick, engines.facts = None, EngineCapabilities(frozenset({"m"}), "0.33")
        await until_async(lambda: member.life.state is HealthState.HEALTHY)

    assert member.facts.version == "0.33"
    assert engines.readings == 2


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("undrained_s", [4.0, 5.0, 9.0], ids=["while it is away", "at once", "later"])
def test_what_a_drained_engine_is_behind_its_restart_is_read_anew(registry, engines, role, undrained_s):
    """So engines are replaced: a connector that has changed fits others, whenever the engine gets requests again."""

    async def replace():
        member = add(registry, role)
        async with prober(registry, engines, drain_idle_s=1.0, health_check_interval_s=1.0).running():
            await asyncio.sleep(3)
            registry.departures.drain(member.instance.id, now=now())
            await asyncio.sleep(3)
            engines.sick = ProbeFailed("cannot be reached")
            engines.shown = Numbers(EngineCapabilities(connector="pdrelay", protocol="5", fingerprint="f" * 16))
            loop = asyncio.get_running_loop()
            loop.call_later(5.0, setattr, engines, "sick", None)
            loop.call_later(undrained_s, lambda: registry.departures.undrain(member.instance.id, now=now()))
            await asyncio.sleep(15)
        return member

    _, member = in_simulated_time(replace())

    assert member.life.state is HealthState.HEALTHY
    assert (member.facts.protocol, member.facts.fingerprint) == ("5", "f" * 16)


async def test_requests_at_an_engine_that_answers_no_probe_for_long_are_given_up(registry, engines, caplog):
    """Not at once: it may be busy. And not those of an engine that answers."""
    member = add(registry)
    given_up = []

    def give_up(instance, *, silent_s):
        given_up.append((instance.id, silent_s, member.life.silent_s(now=now()) >= 0.2))
        return 3

    async with prober(registry, engines, give_up, health_check_interval_s=0.05, hung_s=0.2).running():
        await until_async(lambda: member.life.state is HealthState.HEALTHY)
        await asyncio.sleep(0.3)
        assert given_up == []
        engines.sick = ProbeFailed("does not answer /health within 5 s")
        await until_async(lambda: given_up)

    assert set(given_up) == {("decode-0", 0.2, True)}
    assert "decode-0 has answered no probe for 0.2 s: 3 requests are given up" in caplog.text


async def test_a_bug_in_one_look_does_not_end_the_probing(registry, engines, caplog):
    """It is logged, and the other engines are looked at."""
    add(registry)
    engines.sick = KeyError("a bug")
    async with prober(registry, engines, health_check_interval_s=0.05).running():
        await until_async(lambda: engines.looks >= 3)

    assert "the probe of decode-0 failed" in caplog.text


async def test_many_engines_are_not_all_asked_at_once(registry, engines):
    """A router in front of hundreds must not open hundreds of connections in one moment."""
    for port in range(60):
        add(registry, port=port + 1)
    async with prober(registry, engines, health_check_interval_s=5).running():
        await until_async(lambda: engines.looks == 60)

    assert engines.most_at_once <= 16


async def test_without_an_interval_only_drained_engines_are_asked(registry, engines):
    """Requests alone tell how the others are."""
    add(registry)
    draining = add(registry, Role.PREFILL)
    registry.departures.drain(draining.instance.id, now=now())
    async with prober(registry, engines, health_check_interval_s=0).running():
        await until_async(lambda: engines.readings >= 1)
        assert (engines.looks, draining.life.state) == (0, HealthState.DRAINING)
        engines.shown = Numbers(EngineCapabilities(connector="pdrelay"), leases=0)
        await until_async(lambda: draining.life.state is HealthState.DRAINED)

    assert draining.life.why == "has no request left and keeps nothing for decode engines"


async def test_a_prefill_engine_that_cannot_be_asked_is_drained_after_a_while(registry, engines):
    """It has died while it was drained: nobody will ever know what it kept."""
    member = add(registry, Role.PREFILL)

    async def numbers(instance):
        raise ProbeFailed("cannot be reached")

    engines.numbers = numbers
    registry.departures.drain(member.instance.id, now=now())
    async with prober(registry, engines, drain_idle_s=0.3).running():
        await until_async(lambda: member.life.state is HealthState.DRAINED)

    assert "does not say what it keeps" in member.life.why


async def test_an_engine_that_hangs_is_looked_at_once_at_a_time(registry, engines):
    """Or looks that wait for an answer would pile up."""
    add(registry)
    never = asyncio.Event()
    engines.most = 0

    async def probe(instance, *, is_whole):
        engines.most += 1
        await never.wait()

    engines.probe = probe
    async with prober(registry, engines, health_check_interval_s=0.05).running():
        await asyncio.sleep(0.5)

    assert engines.most == 1


async def test_an_engine_that_hides_its_metrics_lives(registry, engines):
    """Only its connector is unknown then."""
    member = add(registry)

    async def numbers(instance):
        raise ProbeFailed("does not answer /metrics within 5 s")

    engines.numbers = numbers
    async with prober(registry, engines, health_check_interval_s=0.1).running():
        await until_async(lambda: engines.looks >= 2)

    assert (member.life.state, member.facts.connector) == (HealthState.HEALTHY, None)


async def test_the_log_tells_what_becomes_of_an_engine_whoever_finds_out(registry, engines, caplog):
    """A break by requests stands there as one by probes does, once each; it is the first thing read at night."""
    caplog.set_level("INFO", "pdrelay_proxy")
    member = add(registry)
    add(registry, port=2)  # the last of its role would stay
    engines.sick = ProbeFailed("cannot be reached")
    async with prober(registry, engines, health_check_interval_s=0.05).running():
        await until_async(lambda: "decode-0 is starting: cannot be reached" in caplog.text)
        engines.sick = None
        await until_async(lambda: caplog.text.count("is healthy: answers probes again") == 2)
        for number in range(5):
            member.life.failed(RequestId(f"r{number}"), Failure.TIMEOUT, now=now())
        await until_async(
            lambda: "decode-0 is ejected: 5 requests in a row failed: the last one timed out" in caplog.text
        )
        await asyncio.sleep(0.3)

    assert len([record for record in caplog.records if record.getMessage().startswith("decode-0")]) == 3


async def test_what_an_engine_says_of_itself_is_on_one_line(registry, engines, caplog):
    """Its version and its models stand in logs, in tables and on the status page."""
    caplog.set_level("INFO", "pdrelay_proxy")
    engines.facts = EngineCapabilities(frozenset({"m\nn"}), "0.32\nINFO forged\u2028")
    engines.shown = Numbers(
        EngineCapabilities(
            connector="pdrelay", protocol="4\r", fingerprint="0123\x1b[2J", mode=EngineMode.PUSH, engine_id="e\x85"
        )
    )
    decode, prefill = add(registry), add(registry, Role.PREFILL, 2)
    registry.learn(prefill.instance.id, EngineCapabilities(revision="a\nb"))
    async with prober(registry, engines, health_check_interval_s=0.05).running():
        await until_async(lambda: decode.facts.engine_id)

    facts = decode.facts
    assert (facts.models, facts.version) == (frozenset({"m\\nn"}), "0.32\\nINFO forged\\u2028")
    assert (facts.protocol, facts.fingerprint, facts.engine_id) == ("4\\r", "0123\\x1b[2J", "e\\x85")
    assert prefill.facts.revision == "a\\nb"


def test_an_engine_that_never_comes_is_warned_of_once(caplog):
    """With the cause, which may be a wrong name or a wrong key: one INFO line at the start is soon out of sight."""
    caplog.set_level("INFO", "pdrelay_proxy")
    registry = Registry()
    engines = Engines()
    engines.sick = ProbeFailed("cannot be reached: its name does not resolve")

    async def starting():
        clock = asyncio.get_running_loop().time
        late, early = (registry.add(Role.DECODE, Address("http", name, 1), now=clock()) for name in ("a", "b"))
        registry.member(early.id).life.seen(now=clock())
        async with Prober(registry, engines, Settings(), clock, lambda: 0.5).running():
            await asyncio.sleep(29)
            before = [record.levelname for record in caplog.records if late.id in record.message]
            await asyncio.sleep(300)
        return before

    _, before = in_simulated_time(starting())

    said = [(one.levelname, one.message) for one in caplog.records if one.message.startswith("decode-0")]
    assert before == ["INFO"]
    assert said == [
        (level, "decode-0 is starting: cannot be reached: its name does not resolve") for level in ("INFO", "WARNING")
    ]

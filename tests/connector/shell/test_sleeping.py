"""Engines that sleep, with vLLM's scheduler: what was handed over before is not read after, and all goes on."""

import dataclasses
import random
import warnings
from collections import Counter

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from pdrelay_connector.shell import vllm_versions

    if not vllm_versions.ASKS_WHAT_IS_LOADED:
        pytest.skip("the stories' kinds need vLLM 0.32", allow_module_level=True)
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.request import RequestStatus

    from support.async_kinds import AsyncPair, Chances, play
    from support.cache_kinds import CONTEXT, MODES, Pair
    from support.divided_kinds import PAIRS
    from support.kinds_table import KINDS

from pdrelay_connector.errors import ConnectorError, SettingsError
from support.story_seeds import SEEDS, story_marks

pytestmark = story_marks(10)
PROMPT = [number % 3 for number in range(61)]
NAMES = ["full attention", "sliding window", "state of Mamba 2", "two parts to four"]


@pytest.fixture(params=NAMES)
def pair(request):
    if request.param in PAIRS:  # ranks divide a context
        p, d = PAIRS[request.param]
        return Pair(p, dataclasses.replace(d, blocks=200))
    kind = KINDS[request.param]
    return Pair(kind.shape(blocks=56), kind.shape(blocks=200))


def offered(pair, name="r"):
    """Have P compute a prompt; return what it offers."""
    offers = []
    pair.asked[name] = PROMPT, [], 3
    pair.awaited[f"p-{name}"] = offers.append
    pair.prefill(name, PROMPT, "pull")
    pair.run(1.0)
    (offer,) = offers
    return offer


def check_has_text(pair, *, loaded):
    assert pair.is_done
    assert pair.d.loaded == set(loaded)
    for engine in (pair.p, pair.d):
        assert engine.pool.get_num_free_blocks() == engine.shape.blocks - 1


def test_an_offer_from_before_a_sleep_is_not_taken_after_it(pair):
    """P's memory is another's, at other addresses, under the same port: as after a restart, D computes the prompt."""
    offer = offered(pair)
    pair.p.sleep()
    pair.p.wake_up()
    pair.d.ask("r", PROMPT, most=3, params=offer)
    pair.run(30.0)

    check_has_text(pair, loaded=[])


def test_an_offer_of_an_engine_that_sleeps_costs_a_prefill(pair):
    """Its port answers, and says why nothing comes."""
    offer = offered(pair)
    pair.p.sleep()
    pair.d.ask("r", PROMPT, most=3, params=offer)
    pair.run(30.0)

    check_has_text(pair, loaded=[])


def test_after_a_sleep_kv_is_handed_over_as_before(pair):
    """Both have slept, and more than once; D has met P under another name."""
    before = offered(pair, "a")
    pair.d.ask("a", PROMPT, most=3, params=before)
    pair.run(30.0)
    for engine in (pair.p, pair.d, pair.p):
        engine.sleep()
        pair.run(1.0)
        engine.wake_up()
        pair.run(1.0)
    after = offered(pair, "b")
    pair.d.ask("b", PROMPT, most=3, params=after)
    pair.run(30.0)
    pair.ask("c", PROMPT[::-1], 3, "push")
    pair.run(30.0)

    assert [before["remote_engine_id"], after["remote_engine_id"]] == ["p", "p_gen2"]
    check_has_text(pair, loaded=["a", "b", "c"])


def test_a_read_across_a_sleep_does_not_count(pair):
    """P waits for its end before the memory goes, and its lease is over."""
    offer = offered(pair)
    pair.d.movers[1].stuck = True
    pair.d.ask("r", PROMPT, most=3, params=offer)
    pair.run(1.0)
    assert pair.d.movers[1]._xfers
    wait = pair.p.connector._scheduler._control._outbox.wait
    waited = []

    def until_read(seconds):
        waited.append(seconds)
        pair.d.movers[1].stuck = len(waited) < 5
        wait(seconds)

    pair.p.connector._scheduler._control._outbox.wait = until_read
    pair.p.sleep()
    pair.run(30.0)

    assert len(waited) > 5
    check_has_text(pair, loaded=[])


@pytest.mark.parametrize("sleeper", ["p", "d"])
def test_a_push_that_waits_for_its_prefill_fails_when_an_engine_sleeps(pair, sleeper):
    """P must not write into memory that went, and D must not wait for one that sleeps."""
    pair.register("r", PROMPT, 3)
    pair.run(1.0)
    if sleeper == "d":
        pair.d.abort("r")  # as vLLM does before it sleeps: blocks that wait for KV would hinder the reset
        del pair.asked["r"]
        pair.run(1.0)
    engine = getattr(pair, sleeper)
    engine.sleep()
    pair.run(30.0)
    engine.wake_up()
    pair.run(30.0)

    check_has_text(pair, loaded=[])


def test_what_comes_to_a_decode_engine_that_sleeps_is_loaded_when_it_wakes(pair):
    """VLLM queues requests meanwhile; what they order of the connector must not go to threads that end."""
    pair.d.sleep()
    pair.ask("a", PROMPT, 3, "push")
    offer = offered(pair, "b")
    pair.d.ask("b", PROMPT, most=3, params=offer)
    pair.run(5.0)
    assert not pair.is_done
    pair.d.wake_up()
    pair.run(30.0)

    assert pair.is_done
    assert "a" in pair.d.loaded  # and "b" finds its blocks, or loads them


def test_an_engine_that_cannot_sleep_says_so_and_goes_on(pair):
    """VLLM passes the error on, and no worker has let go of anything."""
    offer = offered(pair)
    pair.d.ask("r", PROMPT, most=3, params=offer)
    pair.d.movers[1].stuck = True
    pair.run(1.0)
    assert pair.d.movers[1]._xfers

    pair.p.control.lease_manager.leases.has_late_reads = lambda now: True  # one that never hears of its end
    with pytest.raises(ConnectorError, match="cannot sleep now: another engine still reads its cache"):
        pair.p.sleep()
    pair.d.movers[1].stuck = False
    pair.p.scheduler.set_pause_state(PauseState.UNPAUSED)
    pair.run(30.0)

    check_has_text(pair, loaded=[])


def test_an_engine_whose_side_channel_does_not_start_wakes_with_the_next_order(pair):
    """Its port may be taken for a while, or its certificate be unreadable: vLLM passes the error on, and goes on."""
    pair.p.sleep()
    processes, start = pair.p.processes, pair.p._start_control
    pair.p._start_control = refuse_to_start
    with pytest.raises(SettingsError, match="cannot listen"):
        pair.p.wake_up()
    pair.p.processes, pair.p._start_control = processes, start
    pair.p.wake_up()
    offer = offered(pair)
    pair.d.ask("r", PROMPT, most=3, params=offer)
    pair.run(30.0)

    check_has_text(pair, loaded=["r"])


def refuse_to_start(*_):
    raise SettingsError("the side channel cannot listen")


def sleep(engine):
    """Have an engine sleep, unless vLLM refuses it: loads and quarantined blocks keep the cache in use."""
    waiting = RequestStatus.WAITING_FOR_REMOTE_KVS
    if any(request.status == waiting for request in engine.scheduler.requests.values()):
        return False
    try:
        engine.sleep()
    except RuntimeError:
        engine.scheduler.set_pause_state(PauseState.UNPAUSED)
        assert engine.decodes._quarantined
        return False
    return True


@pytest.mark.parametrize("name", ["full attention", "sliding window beside full attention", "state of Mamba 2"])
def test_whenever_engines_sleep_each_token_is_computed_from_the_right_kv(name):
    """In the middle of pushes, of reads by others and of prompts, and for as long as it may be; nothing is left."""
    slept = 0
    for seed in range(SEEDS):
        shape = KINDS[name].shape(blocks=60)
        dice = random.Random(seed)
        pair = Pair(shape, shape, writes_at_once=seed % 2 == 1)
        trunk = dice.choices(range(3), k=CONTEXT)
        for number in range(20):
            prompt = trunk[: dice.choice((7, 30, 55))] + dice.choices(range(3), k=dice.randrange(1, 20))
            pair.ask(f"r{number}", prompt, dice.randrange(1, 12), dice.choice(MODES))
            for _ in range(dice.choice((0, 0, 1, 3, 8))):
                pair.round()
            engine = dice.choice((pair.p, pair.d))
            if dice.random() < 0.3 and sleep(engine):
                slept += 1
                for _ in range(dice.choice((0, 1, 4))):
                    pair.round()
                engine.wake_up()
        for _ in range(200):
            if pair.is_done:
                break
            pair.run(1.0)

        assert pair.is_done, "some texts are missing"
        assert len(pair.d.loaded) >= 3
        pair.run(120.0)
        assert [engine.pool.get_num_free_blocks() for engine in (pair.p, pair.d)] == [59, 59]

    assert slept >= 2 * SEEDS


class SleepingPair(AsyncPair):
    """Engines sleep in each of vLLM's modes, with steps in flight."""

    rest = 130.0  # longer than a quarantine

    def meddle(self):
        super().meddle()
        if self.dice.random() < 0.15:
            engine, mode = self.dice.choice((self.p, self.d)), self.dice.choice(("abort", "keep", "wait"))
            self.counts["slept"] += self._sleep(engine, mode)

    def _sleep(self, engine, mode):
        """Have an engine sleep for a while, unless vLLM refuses it."""
        if mode == "abort":
            for name in [name for name in self.asked if not self.is_over(name)]:
                self.leave(name)
        try:
            engine.sleep(mode)
        except RuntimeError as refusal:
            if "Failed to reset KV cache" not in str(refusal):
                raise
            engine.scheduler.set_pause_state(PauseState.UNPAUSED)
            return False
        for _ in range(self.dice.choice((0, 1, 4))):
            self.round()
        engine.wake_up()
        return True


@pytest.mark.parametrize("name", ["full attention", "sliding window beside full attention", "state of Mamba 2"])
def test_with_steps_in_flight_engines_sleep_in_each_of_vllms_modes(name):
    """What was in flight has come to its end before the memory goes, and nothing of it counts for another's."""
    shape = KINDS[name].shape(blocks=60)
    counts = Counter()
    for seed in range(SEEDS):
        counts += play(shape, shape, Chances(seed, leaves=0.05), pair_class=SleepingPair).counts

    assert counts["loaded"] >= 3 * SEEDS
    assert counts["slept"] >= SEEDS

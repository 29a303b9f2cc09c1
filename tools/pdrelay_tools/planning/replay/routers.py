"""Chooses engines for a replay: by the router's own policies, or a model of vllm-router's."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from random import Random
from typing import TYPE_CHECKING, Final, TypeAlias

from pdrelay_proxy.building.engines import Fabric, build_engines
from pdrelay_proxy.core.address import Address
from pdrelay_proxy.core.fleet.compatibility import EngineCapabilities
from pdrelay_proxy.core.fleet.push_coordinates import PushCoordinates
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import ANY, Api, Instance, InstanceId, RequestId, Role, RoutingHints
from pdrelay_proxy.core.request_record import RequestRecord
from pdrelay_proxy.core.routing.group_choice import GroupChoice
from pdrelay_proxy.core.routing.pair_selector import PairSelector
from pdrelay_proxy.core.routing.pairing import PolicyPerLeg
from pdrelay_proxy.core.routing.retries import RetryAttempts
from pdrelay_proxy.core.routing.route import route
from pdrelay_proxy.core.routing.routing_parts import RoutingParts
from pdrelay_proxy.core.schemas import NamedMetrics
from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.features import FEATURES, feature_policies, features, pairs_within
from pdrelay_proxy.features.feature import Ground
from pdrelay_proxy.io.request_path.live_fleet import LiveFleet, Loads
from pdrelay_proxy.io.request_path.policies import fleet_of
from pdrelay_proxy.io.routing_plugins import installed_policies
from pdrelay_proxy.known_settings import OPTIONS, with_values
from pdrelay_proxy.settings import PolicyName, Settings
from pdrelay_tools.planning.replay.kv_cache import CacheEvents
from pdrelay_tools.planning.replay.traces import (
    BYTES_PER_TOKEN,
    NoReplay,
    Trace,
)

if TYPE_CHECKING:
    from pdrelay_tools.planning.replay.followed_caches import FollowedCaches

Load: TypeAlias = Callable[[Instance], float]
_PAUSE: Final = "max_decode_itl_s"  # a feature's
_TICK_S: Final = 0.25  # as requests/request_set.py
# of an answer
_USAGE: Final = b'{"usage":{"prompt_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}}'
VLLM_ROUTER: Final = "vllm-router"
CHOICES: Final = (*map(str, PolicyName), *feature_policies(), VLLM_ROUTER)


class VllmRouter:
    """vllm-router's default policy, ``cache_aware``, as src/policies/cache_aware.rs of
    vllm-project/router has it.

    It chooses the engine that was sent the longest prefix of this text, if that is more than 0.3 of
    the text. Otherwise, or if the loads differ by more than 64 requests and by half, it chooses the
    engine with the fewest requests. Not modelled: session keys, and eviction from its tree (beyond
    2**26 characters).
    """

    def __init__(self, load: Load) -> None:
        self._load = load
        # the engine that was sent a block last; its name is a hash of all text up to its end
        self._last_engine = OrderedDict[bytes, InstanceId]()

    def choose(self, among: Sequence[Instance], hints: RoutingHints = ANY, /) -> Instance:
        """Return one of these engines."""
        loads = [self._load(instance) for instance in among]
        chosen = among[loads.index(min(loads))]
        blocks = _chain(bytes(hints.prompt))
        matched = next(
            (count for count, block in enumerate(blocks) if block not in self._last_engine),
            len(blocks),
        )
        uneven = max(loads) - min(loads) > 64 and max(loads) > 1.5 * min(loads)
        if blocks and matched / len(blocks) > 0.3 and not uneven:
            best = self._last_engine[blocks[matched - 1]]
            # it may have left, or changed its role
            chosen = next((instance for instance in among if instance.id == best), chosen)
        self._last_engine.update(dict.fromkeys(blocks, chosen.id))
        return chosen

    def copy(self) -> "VllmRouter":
        """Return itself: no part of a replay tries a choice out."""
        return self


def _chain(text: bytes, size: int = 512) -> Sequence[bytes]:
    names = list[bytes]()
    name = b""
    for start in range(0, len(text), size):
        name = blake2b(text[start : start + size], key=name, digest_size=12).digest()
        names.append(name)
    return names


class ReplayRouter:
    """Chooses engines for the turns of a trace, and counts their requests, as the router does."""

    def __init__(
        self,
        choice: str,
        engines: tuple[int, int],
        trace: Trace,
        clock: Callable[[], float],
        seed: int,
        *,
        kv_events: bool = False,
    ) -> None:
        """``choice``: a policy, or one for each leg (``prefix/session``).

        A choice may add when a decode engine serves alone: ``:2048``, below so many new bytes, and
        ``:20ms``, the longest pause in its streams. ``engines``: how many prefill and decode
        engines. ``kv_events``: engines publish what they have cached, and prompts are token ids, by
        which a router can look them up. Raises NoReplay: no such policy.
        """
        names, least, itl_s = _parsed(choice)
        self._caches = _followed_caches(clock) if kv_events else None
        self._settings = Settings(min_split_new_bytes=least)
        if itl_s:
            self._settings = _with_pause(self._settings, itl_s)
        added = () if self._caches is None else (self._caches.routing,)
        self.fleet = _fleet(names, clock, Random(seed).randrange, added, self._settings)
        facts = EngineCapabilities(adapters=frozenset())
        for role, number in zip((Role.PREFILL, Role.DECODE), engines, strict=True):
            for engine in range(number):
                self.fleet.registry.add(
                    role, Address("http", f"{role}-{engine}", 8000), facts=facts
                )
        self._trace = trace
        self._clock = clock
        self._requests = dict[int, tuple[RoutingHints, RequestRecord]]()
        # seconds between the tokens of streams that the policy has not learned from yet
        self._gaps = dict[InstanceId, list[float]]()
        self._learned_at = 0.0

    def events(self, engine: InstanceId) -> CacheEvents | None:
        """Return where an engine publishes its KV events; None: the router does not follow them."""
        return None if self._caches is None else self._caches.of(engine, self._trace.block_tokens)

    def choose(self, number: int) -> tuple[Instance | None, Instance]:
        """Return the engines of a turn's legs; no prefill engine: decode-only."""
        fleet = self.fleet
        request = RequestId(str(number))
        hints = self._hints_of(number)
        self._learn_gaps()
        choice = route(fleet, hints, Api.CHAT.value, RetryAttempts(0), self._settings, reason=None)
        record = RequestRecord(request, Api.CHAT.value, single_reason=choice.reason)
        record.cached = choice.cached or (0, hints.blocks.size)
        self._requests[number] = hints, record
        prefill = choice.prefill
        decode = choice.decode
        fleet.enter(decode, request)  # before the prefill leg, as requests/dispatch.py
        for listener in fleet.listeners:
            listener.slot_held(decode, request)
        if prefill is not None:
            fleet.enter(prefill, request)
            self._note_sent(prefill, number, computes=True)
        else:
            self._note_sent(decode, number, computes=True)
        return prefill, decode

    def _hints_of(self, number: int) -> RoutingHints:
        prompt = self._trace.text(number) if self._caches is None else self._trace.ids(number)
        return RoutingHints(session=self._trace.turns[number].session, prompt=prompt)

    def handed_over(self, decode: Instance, number: int) -> None:
        """The decode leg is sent behind a prefill engine's answer."""
        self._note_sent(decode, number, computes=False)

    def first_token(self, decode: Instance, number: int) -> None:
        """A decode engine has sent the first token."""
        for listener in self.fleet.listeners:
            listener.stream_begun(decode, RequestId(str(number)), self._requests[number][0])

    def stepped(self, decode: InstanceId, gap_s: float) -> None:
        """The streams of a decode engine got their next tokens so long after the ones before."""
        if self.fleet.stepped is not None:
            self._gaps.setdefault(decode, []).append(gap_s)

    def _note_sent(self, instance: Instance, number: int, *, computes: bool) -> None:
        request = RequestId(str(number))
        hints, _ = self._requests[number]
        for listener in self.fleet.listeners:
            listener.leg_sent(instance, request, hints, computes=computes, is_timed=True)

    def _learn_gaps(self) -> None:
        """Report the streams' gaps to the policy, as often as the router does."""
        learn = self.fleet.stepped
        now = self._clock()
        if learn is not None and now >= self._learned_at + _TICK_S:
            self._learned_at = now
            for decode, gaps in self._gaps.items():
                learn(decode, gaps)
            self._gaps.clear()

    def prefilled(self, prefill: Instance, number: int, waiting: int, kv_use: float) -> None:
        """A prefill engine has answered, and reports its load with the answer."""
        self.fleet.registry.member(prefill.id).load.reported(
            NamedMetrics(waiting, kv_use), now=self._clock()
        )
        hints = self._requests[number][0]
        tokens = self._trace.turns[number].prompt_tokens
        for listener in self.fleet.listeners:
            listener.prompt_computed(prefill, RequestId(str(number)), hints, tokens)
        self._release(prefill, number)

    def answered(self, decode: Instance, number: int, cached_tokens: int) -> None:
        """The last token of an answer has come, with the number of cached prompt tokens."""
        turn = self._trace.turns[number]
        hints, record = self._requests.pop(number)
        record.wrote(_USAGE % (turn.prompt_tokens, cached_tokens))
        record.relayed += turn.output_tokens * BYTES_PER_TOKEN
        for listener in self.fleet.listeners:
            listener.answered(decode, hints, record)
        self._release(decode, number)

    def _release(self, instance: Instance, number: int) -> None:
        self.fleet.all_answered(instance, (RequestId(str(number)),))
        self.fleet.leave(instance, RequestId(str(number)))


def _parsed(choice: str) -> tuple[str, int, float]:
    """Return the policies, and when one engine serves alone: most new bytes, most stream pause."""
    names, *bounds = choice.split(":")
    least = 0
    itl_s = 0.0
    for alone in bounds:
        number = alone.removesuffix("ms")
        if not (number.isascii() and number.isdigit() and len(number) < 10):
            raise NoReplay(
                f"{alone!r} in the policy {choice!r} is neither a number of bytes "
                f"(--min-split-new-bytes) "
                "nor of milliseconds, as 20ms (--max-decode-itl)"
            )
        if number == alone:
            least = int(number)
        else:
            itl_s = int(number) / 1e3
    return names, least, itl_s


def _with_pause(settings: Settings, seconds: float) -> Settings:
    """Return settings with a longest pause in streams; raises NoReplay: no feature looks at it."""
    if _PAUSE not in OPTIONS:
        raise NoReplay("this router has no feature that looks at the pauses in streams (:20ms)")
    return with_values(settings, {_PAUSE: seconds})


def _followed_caches(clock: Callable[[], float]) -> "FollowedCaches":
    """Return the caches that a router follows; raises NoReplay: it has no feature that does."""
    if "kv_events" not in FEATURES:
        raise NoReplay("this router has no feature that follows KV events (--kv-events)")
    from pdrelay_tools.planning.replay.followed_caches import FollowedCaches  # noqa: PLC0415 (a feature's)

    return FollowedCaches(clock)


def _fleet(
    choice: str,
    clock: Callable[[], float],
    dice: Callable[[int], int],
    added: Sequence[RoutingParts],
    settings: Settings,
) -> LiveFleet:
    """Return an empty fleet with its policies."""
    names = choice.split("/") if "/" in choice else [choice, choice]
    if len(names) != 2 or not set(names) <= {*CHOICES, *installed_policies()}:
        raise NoReplay(
            f"there is no policy {choice!r}: name one, or one/other, of {', '.join(CHOICES)}"
        )
    learned = PushCoordinates(at_once=True)
    if VLLM_ROUTER not in names:
        settings = replace(settings, prefill_policy=names[0], decode_policy=names[1])
        try:
            engines = build_engines(settings, Fabric(clock=clock), pairs_within(settings))
            ground = Ground(settings, engines, clock)
            parts = [*[feature(ground).routing() for feature in features()], *added]
            return fleet_of(settings, engines.registry, learned, clock, dice, added=parts)
        except ConfigError as exc:
            raise NoReplay(str(exc)) from exc
    if names[0] != names[1]:
        raise NoReplay(f"{VLLM_ROUTER} chooses both engines, so it has no partner")
    registry = Registry(Settings())
    load = Loads(registry, clock).of
    pairs = PairSelector(registry, GroupChoice(PolicyPerLeg(VllmRouter(load), VllmRouter(load))))
    return LiveFleet(registry, pairs, learned, clock)

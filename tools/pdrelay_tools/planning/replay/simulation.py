"""Replays a trace through a router and simulated engines, in virtual time."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from pdrelay_proxy.core.model import Instance, Role
from pdrelay_tools.planning.engine_model import EngineModel
from pdrelay_tools.planning.replay.engine import (
    EngineLog,
    EventLoop,
    TurnedEngine,
    VirtualEngine,
    VirtualLeg,
)
from pdrelay_tools.planning.replay.routers import ReplayRouter
from pdrelay_tools.planning.replay.traces import NoReplay, Trace, Turn

if TYPE_CHECKING:
    from pdrelay_tools.planning.replay.roles import RolesPlan


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """The engines. Those of a role are alike; any decode engine can serve alone."""

    prefill: int
    decode: int
    model: EngineModel = field(default_factory=EngineModel)
    decode_model: EngineModel | None = None  # None: the same
    odd_model: EngineModel | None = None  # of the last prefill engine, if that is another
    kv_events: bool = False  # engines publish what is in their caches, and the router follows it
    roles: "RolesPlan | None" = None  # how engines change roles; None: they do not


@dataclass(slots=True)
class Served:
    """How one turn of a conversation was served. Times are seconds of the replay."""

    turn: Turn
    came: float
    new_tokens: int  # of the prompt, not in any earlier prompt or answer
    best_hit: int  # prompt tokens in the best of all caches when it came
    first: float = 0.0  # when its first token came
    ended: float = 0.0  # when its last one did
    legs: list[tuple[Role, VirtualLeg]] = field(default_factory=list[tuple[Role, VirtualLeg]])

    @property
    def ttft_s(self) -> float:
        """Return the time to the first token."""
        return self.first - self.came

    @property
    def itl_s(self) -> float:
        """Return the mean time between two of its tokens."""
        return (self.ended - self.first) / max(1, self.turn.output_tokens - 1)

    @property
    def hit(self) -> int:
        """Return the prompt tokens that were cached at the engine that computed the prompt."""
        return self.legs[0][1].cached_tokens


@dataclass(frozen=True, slots=True)
class Replayed:
    """How a trace was served."""

    policy: str
    served: Sequence[Served]
    engines: Sequence[tuple[Role, EngineLog]]
    turned: Sequence[TurnedEngine] = ()


def replay(trace: Trace, policy: str, fleet: SimulatedFleet, *, seed: int) -> Replayed:
    """Serve a trace.

    Raises NoReplay: there is no such policy, or a turn is larger than an engine.
    """
    return _Replay(trace, policy, fleet, seed).run()


class _Replay:
    def __init__(self, trace: Trace, policy: str, fleet: SimulatedFleet, seed: int) -> None:
        self._trace = trace
        self._policy = policy
        models = {Role.PREFILL: fleet.model, Role.DECODE: fleet.decode_model or fleet.model}
        self._loop = EventLoop()
        self._router = ReplayRouter(
            policy,
            (fleet.prefill, fleet.decode),
            trace,
            lambda: self._loop.now,
            seed,
            kv_events=fleet.kv_events,
        )
        instances = (
            *self._router.fleet.known(Role.PREFILL),
            *self._router.fleet.known(Role.DECODE),
        )
        by_id = {instance.id: models[instance.role] for instance in instances}
        if fleet.odd_model is not None:
            by_id[instances[fleet.prefill - 1].id] = fleet.odd_model
        self._engines = {
            name: VirtualEngine(
                model,
                trace.block_tokens,
                self._loop,
                partial(self._router.stepped, name),
                seed=seed * len(by_id) + number,
                events=self._router.events(name),
            )
            for number, (name, model) in enumerate(by_id.items())
        }
        self._roles = {instance.id: instance.role for instance in instances}
        self._roles_of_engines = (
            None
            if fleet.roles is None
            else fleet.roles.begin(
                self._router.fleet.registry, self._engines, self._roles, self._loop
            )
        )
        self._ended_count = 0
        self._served = list[Served]()
        self._known_blocks = set[int]()  # blocks of all prompts and answers so far
        self._next = dict[int, list[int]]()  # turn -> the turns that wait for it

    def run(self) -> Replayed:
        for number, turn in enumerate(self._trace.turns):
            if not all(
                engine.fits(turn.prompt_tokens, turn.output_tokens)
                for engine in self._engines.values()
            ):
                size = turn.prompt_tokens + turn.output_tokens
                raise NoReplay(
                    f"request {number} has {size:,} tokens, and an engine has room for fewer "
                    f"(kv_tokens)"
                )
            if turn.goes_on is not None and turn.waits:
                self._next.setdefault(turn.goes_on, []).append(number)
            else:
                self._loop.after(turn.at_s, partial(self._arrive, number))
        turning = self._roles_of_engines
        if turning is not None:
            turning.start(lambda: self._ended_count == len(self._trace.turns))
        self._loop.run()
        # the last name of an engine that changed its role
        names = {id(engine): name for name, engine in self._engines.items()}
        logs = [(self._roles[name], self._engines[name].log) for name in names.values()]
        turned = () if turning is None else turning.turned
        return Replayed(self._policy, self._served, logs, turned)

    def _arrive(self, number: int) -> None:
        turn = self._trace.turns[number]
        served = Served(turn, self._loop.now, self._new_tokens(turn), self._best_hit(turn))
        self._served.append(served)
        prefill, decode = self._router.choose(number)
        if prefill is None:
            self._decode(number, served, decode, None)
            return
        ended = partial(self._prefilled, number, served, prefill, decode)
        leg = VirtualLeg(
            self._trace.full_blocks(turn), turn.prompt_tokens, 1, holds_blocks=True, ended=ended
        )
        self._send(served, prefill, leg)

    def _prefilled(
        self, number: int, served: Served, prefill: Instance, decode: Instance, leg: VirtualLeg
    ) -> None:
        engine = self._engines[prefill.id]
        self._router.prefilled(prefill, number, len(engine.waiting), engine.kv_use)
        self._router.handed_over(decode, number)
        self._decode(number, served, decode, (engine, leg))

    def _decode(
        self,
        number: int,
        served: Served,
        decode: Instance,
        source: tuple[VirtualEngine, VirtualLeg] | None,
    ) -> None:
        leg = VirtualLeg(
            self._trace.full_blocks(served.turn),
            served.turn.prompt_tokens,
            served.turn.output_tokens,
            self._trace.answer_blocks(served.turn),
            source,
            first=partial(self._first, number, served, decode),
            ended=partial(self._ended, number, served, decode),
        )
        self._send(served, decode, leg)

    def _send(self, served: Served, instance: Instance, leg: VirtualLeg) -> None:
        served.legs.append((instance.role, leg))
        self._engines[instance.id].send(leg)

    def _first(self, number: int, served: Served, decode: Instance) -> None:
        served.first = self._loop.now
        self._router.first_token(decode, number)

    def _ended(self, number: int, served: Served, decode: Instance, leg: VirtualLeg) -> None:
        served.ended = self._loop.now
        self._ended_count += 1
        self._known_blocks.update(self._trace.answer_blocks(served.turn))
        self._router.answered(decode, number, leg.cached_tokens)
        for waiting in self._next.get(number, ()):
            self._loop.after(self._trace.turns[waiting].at_s, partial(self._arrive, waiting))

    def _best_hit(self, turn: Turn) -> int:
        """Return the most prompt tokens cached at any engine; the last token is always computed."""
        size = self._trace.block_tokens
        blocks = self._trace.full_blocks(turn)
        most = max(engine.cached(blocks) for engine in self._engines.values())
        return size * min(most, (turn.prompt_tokens - 1) // size)

    def _new_tokens(self, turn: Turn) -> int:
        blocks = self._trace.full_blocks(turn)
        known_count = next(
            (count for count, name in enumerate(blocks) if name not in self._known_blocks),
            len(blocks),
        )
        self._known_blocks.update(blocks)
        return turn.prompt_tokens - min(
            known_count, (turn.prompt_tokens - 1) // self._trace.block_tokens
        ) * (self._trace.block_tokens)

"""A fleet of fluids for the controller of roles: exact rates and queues, and noise where a test wants it."""

from random import Random

from pdrelay_proxy.core.model import InstanceId, Role
from pdrelay_proxy.features.roles.engine_totals import EngineReading, EngineTotals
from pdrelay_proxy.features.roles.role_controller import FleetSnapshot, RoleController, RoleLimits
from pdrelay_proxy.features.roles.work_meter import RoleTargets

TARGETS = RoleTargets(ttft_s=2.0, itl_s=0.05)
LIMITS = RoleLimits()
RATE = 10_000.0  # prompt tokens that an engine computes in a second
PROMPT, OUTPUT = 2_000.0, 200.0  # tokens
BASE_S, SLOPE_S = 0.01, 0.001  # time between two tokens, and for each stream more
MOST = (TARGETS.itl_s - BASE_S) / SLOPE_S  # streams within the target
MADE = MOST / TARGETS.itl_s  # tokens that an engine makes in a second then


class Engine:
    """Its totals."""

    def __init__(self):
        self.computed = self.prompts = self.itl_sum = self.itl_count = self.queue = 0.0
        self.running = 0.0
        self.leaves = 0.0


class FluidFleet:
    """Engines in their roles; ``step`` lets time pass, ``look`` has a controller decide, and engines turn at once."""

    def __init__(self, prefill, decode, *, limits=LIMITS, seed=0, noise=0.0, targets=TARGETS):
        self.now, self.chance, self.noise = 1000.0, Random(seed), noise
        self.targets, self.limits = targets, limits
        self.roles = {f"e{n:02d}": Role.PREFILL if n < prefill else Role.DECODE for n in range(prefill + decode)}
        self.engines = {name: Engine() for name in self.roles}
        self.controller = RoleController(targets, limits)
        self.turned = []  # when, to what
        self.decisions = []

    def of(self, role):
        return [self.engines[name] for name, its in self.roles.items() if its is role]

    def step(self, prefill_busy, decode_busy, seconds=10.0):
        """Let traffic come that would keep so many engines of each role busy all the time."""
        p, d = self.of(Role.PREFILL), self.of(Role.DECODE)
        for engine in p:
            tokens = engine.queue * PROMPT + prefill_busy * RATE * seconds / len(p) * self._noisy()
            computed = min(tokens, RATE * seconds)
            engine.computed += computed
            engine.prompts += computed / PROMPT
            engine.queue = (tokens - computed) / PROMPT
            engine.running = 1.0 if self.chance.random() < computed / (RATE * seconds) else 0.0
        for number, engine in enumerate(d):
            uneven = 1.0 + 0.2 * (2 * number / (len(d) - 1) - 1) if len(d) > 1 else 1.0  # as streams of any length are
            made = min(decode_busy * MADE / len(d) * uneven * self._noisy(), 0.95 / SLOPE_S)
            itl_s = BASE_S / (1.0 - made * SLOPE_S)
            engine.itl_count += made * seconds
            engine.prompts += made * seconds / OUTPUT
            engine.itl_sum += made * seconds * itl_s
            engine.running = made * itl_s
        self.now += seconds

    def readings(self):
        return [
            EngineReading(InstanceId(name), role, name, self._totals(self.engines[name]))
            for name, role in self.roles.items()
        ]

    def exposition(self, name):
        """What an engine's /metrics says, as vLLM writes it."""
        one = self._totals(self.engines[name])
        labels = 'engine="0",model_name="sim"'
        values = {
            "num_requests_running": one.running,
            "num_requests_waiting": one.waiting,
            "kv_cache_usage_perc": one.kv_usage,
            "request_prompt_tokens_count": one.prompts,
            "inter_token_latency_seconds_sum": one.itl_sum_s,
            "inter_token_latency_seconds_count": one.itl_count,
        }
        lines = [f"vllm:{metric}{{{labels}}} {value!r}" for metric, value in values.items()]
        for source, value in {"local_compute": one.computed_tokens, "local_cache_hit": 7e9}.items():
            lines.append(f'vllm:prompt_tokens_by_source_total{{{labels},source="{source}"}} {value!r}')
        return "\n".join(["# HELP of vLLM", *lines, ""]).encode()

    def look(self, controller=None):
        decision = (controller or self.controller).decide(
            FleetSnapshot(self.readings(), changed_at=[at for at, _ in self.turned]), now=self.now
        )
        self.decisions.append(decision)
        if decision.role_change is not None:
            self.roles[decision.role_change.instance] = decision.role_change.role
            self.engines[decision.role_change.instance].queue = 0.0
            self.turned.append((self.now, decision.role_change.role))
        return decision

    def run(self, prefill_busy, decode_busy, seconds):
        """Let the same traffic come for a while, and look every ten seconds; return the last decision."""
        for _ in range(int(seconds / 10)):
            self.step(prefill_busy, decode_busy)
            self.look()
        return self.decisions[-1]

    def _noisy(self):
        return 1.0 + self.chance.uniform(-self.noise, self.noise)

    def _totals(self, engine):
        return EngineTotals(
            self.now, engine.running, engine.queue, 0.1, engine.computed, engine.prompts, engine.itl_sum,
            engine.itl_count,
        )  # fmt: skip

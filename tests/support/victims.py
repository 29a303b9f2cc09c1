"""Engines to be frozen, killed, cut off and started again. All chaos tests share them: a start costs 15 CPU-seconds."""

import contextlib
import itertools
import json
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import httpx

from pdrelay_connector.core.push.lost_peer import QUARANTINE
from pdrelay_proxy.core.protocol.push import TransferMode
from pdrelay_tools.local.processes import Child, ProcessGroup
from pdrelay_tools.local.recipe import Connector, EngineSpec, Role, transfer_config
from support.cluster import OVER_TCP, ROOT, engine_spec, metrics, nothing_held, start_engine, wait_until
from support.legs import SLOW_TOKENS, STALL_SECONDS, decode, plain, prefill, prompt_of, text_of
from support.proc import idle_cores, pids_of, wait_stopped

# A busy machine keeps processes that are well from their core for seconds. Three of them end nothing here: D renews
# leases for 4.7 s every 1.2 s, and bears 3.8 s of P's silence (lease_extension and peer_timeout of the connector).
LEASE = 7.0  # s
TIMEOUT, PATIENT = 5.0, 60.0  # s, for a transfer: shorter and longer than a test freezes anybody
LATE = 4.5  # s that what has to be over in time may be late: less than either, so that who waits twice is found
LONG = 30.0  # s for what does not depend on any of these, and is never so when something is wrong
STALL = 20.0  # s
POLICIES = ("recompute", "fail")

HELD, BLOCKS_HELD = "vllm:pdrelay_leases_held", "vllm:pdrelay_blocks_held"
BORROWING, LINGERING = "vllm:pdrelay_requests_waiting_for_remote_kv", "vllm:pdrelay_blocks_quarantined"
EXPIRED, LOADS = "vllm:pdrelay_leases_expired_total", "vllm:pdrelay_loads_total"
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
USAGE = "vllm:kv_cache_usage_perc"
_fresh = itertools.count(10_000)  # numbers of prompts that no engine has in its cache


def lost(why):
    """The counter of loads that failed for one reason: lease, timeout, peer, transfer or handshake."""
    return f"vllm:pdrelay_loads_failed_{why}_total"


@dataclass
class Victim:
    """One engine. Started again, it has the same name and ports."""

    spec: EngineSpec
    fleet: ProcessGroup
    child: Child | None = None

    def start(self):
        if self.child in self.fleet.children and not self.child.alive:
            self.fleet.stop(self.child)
            self.child.raise_if_dead()  # nobody killed it: that fails one test, and the next one has a new engine
        if self.child not in self.fleet.children:
            self.child = start_engine(self.fleet, self.spec)

    def freeze(self):
        self.child.signal(signal.SIGSTOP)
        wait_stopped(*pids_of(self.child.pid))

    def thaw(self):
        self.child.signal(signal.SIGCONT)

    def kill(self):
        self.child.signal(signal.SIGKILL)
        self.fleet.stop(self.child)  # it is gone already; and nobody else is told that a child of the fleet has died

    @contextlib.contextmanager
    def frozen(self):
        self.freeze()
        try:
            yield
        finally:
            self.thaw()

    def now(self, name):
        """Return one of its metrics."""
        return metrics(self.spec)[name]

    @property
    def policy(self):
        return self.spec.failure_policy

    @property
    def at_rest(self):
        """Whether it holds, borrows, serves and computes nothing."""
        return nothing_held(self.spec)


@dataclass
class Victims:
    """A prefill engine, and for each failure policy a decode engine that soon gives a transfer up, and a patient one.

    Every decode engine serves one request at a time, so that others can be made to wait.
    """

    p: Victim
    hasty: dict[str, Victim]
    patient: dict[str, Victim]
    idle: dict[str, tuple[float, float]] = field(default_factory=dict)  # before anybody had met anybody

    @property
    def decoders(self):
        return [*self.hasty.values(), *self.patient.values()]

    @property
    def all(self):
        return [self.p, *self.decoders]

    def ready(self):
        """Start what is dead, and wait until everybody is there and at rest."""
        for victim in self.all:
            victim.start()
        self.p.fleet.wait_ready([victim.child for victim in self.all], timeout_s=300)
        interval, looks = QUARANTINE  # of a P that died on another host while it wrote
        for d in self.decoders:
            wait_until(lambda d=d: d.now(LINGERING) == 0, seconds=interval * looks + 10, what=f"{d.spec.name} has all")
        for victim in self.all:
            wait_until(lambda victim=victim: victim.at_rest, seconds=LONG, what=f"{victim.spec.name} is at rest")

    def note_idle_cores(self):
        """Remember what P and a decode engine use: name -> share of a core, and that of the busiest thread."""
        pair = (self.p, self.hasty["recompute"])
        self.idle = dict(zip("pd", idle_cores([victim.child for victim in pair]), strict=True))

    def stop(self):
        fleet = self.p.fleet
        fleet.stop(*(victim.child for victim in self.all if victim.child in fleet.children))


def make_victims(fleet, model, mode, lab):
    """Describe them; on the hosts of a lab if there is one, else side by side."""
    places = {
        role: (lab.p if role is Role.PREFILL else lab.d).options if lab else {"extra_env": OVER_TCP} for role in Role
    }

    def victim(name, role, *, timeout=TIMEOUT, **options):
        config = {
            "kv_lease_duration": LEASE, "transfer_timeout": timeout, "registration_timeout": timeout,
            "retry_after": 0.1,
        }  # fmt: skip
        place = places[role] | options
        spec = engine_spec(
            name,
            model,
            role=role,
            connector=Connector.PDRELAY,
            mode=TransferMode(mode),
            extra_connector_config=config,
            **place,
        )
        return Victim(stalling(spec), fleet)

    def decoder(policy, timeout, name):
        return victim(
            name,
            Role.DECODE,
            timeout=timeout,
            failure_policy=policy,
            max_model_len=4096,
            extra_args=("--max-num-seqs", "1"),
        )

    return Victims(
        # One prompt a step: vLLM keeps memory for every new number of tokens in a step, and the soak watches memory.
        victim("p-victim", Role.PREFILL, kv_cache_mib=32, extra_args=("--max-num-seqs", "1")),
        {policy: decoder(policy, TIMEOUT, f"d-{policy}") for policy in POLICIES},
        {policy: decoder(policy, PATIENT, f"d-patient-{policy}") for policy in POLICIES},
    )


def stalling(spec):
    """The same engine, with a step of so many seconds when it is asked for (``support.stalling``)."""
    config = transfer_config(spec) | {
        "kv_connector": "StallingConnector",
        "kv_connector_module_path": "support.stalling",
    }
    path = os.pathsep.join(filter(None, (str(ROOT / "tests"), os.environ.get("PYTHONPATH"))))
    return replace(
        spec,
        extra_env={**spec.extra_env, "PYTHONPATH": path, STALL_SECONDS: str(STALL)},
        extra_args=(*spec.extra_args, "--kv-transfer-config", json.dumps(config)),
    )


def check(policy, response, expected):
    """recompute: the right text; fail: an error for this request, and never a wrong text."""
    if policy == "recompute":
        assert text_of(response) == expected
    else:
        failed = response.status_code >= 500 or response.json()["choices"][0]["finish_reason"] == "error"
        assert failed, response.text


def serves_on(d, reference, number):
    """The decode engine is alive, right, and waits for nobody."""
    prompt = prompt_of(number, 50)

    assert plain(d.spec, prompt) == plain(reference, prompt)
    assert httpx.get(f"{d.spec.base_url}/health", trust_env=False).status_code == 200
    wait_until(lambda: d.now(BORROWING) == 0, seconds=LONG, what=f"{d.spec.name} borrows nothing")


def reuse_blocks(p):
    """Have P use every block of its cache for other prompts: 8,192 tokens in float32."""
    for _ in range(5):
        plain(p.spec, prompt_of(next(_fresh), 1900), tokens=1)


@contextlib.contextmanager
def queue_of(count, p, d, *, first, busy=False):
    """Take the only seat of D and queue ``count`` prefilled requests behind it; busy: D computes all the time.

    The seat is free when the test sets the event, or leaves the block.
    """
    prompts = [prompt_of(first + number) for number in range(count)]
    leave = threading.Event()
    with ThreadPoolExecutor(count + 1) as pool:
        seat = pool.submit(hold_seat, d, leave, busy=busy)
        try:
            wait_until(lambda: d.now(RUNNING) == 1, seconds=LONG, what="the long answer runs")
            # Each decode leg follows its prefill at once, as a router sends it: unclaimed leases are short here.
            answers = [pool.submit(decode, d.spec, prompt, prefill(p.spec, prompt)) for prompt in prompts]
            wait_until(lambda: d.now(BORROWING) == count, seconds=LONG, what="all are queued")
            yield prompts, answers, leave
        finally:
            leave.set()
        seat.result()


def hold_seat(d, leave, *, busy=False):
    """Run an answer until the event is set, at which its client leaves; busy: it computes all the time."""
    busily = {"prompt": prompt_of(999, 8), "n": 32, "temperature": 1}  # one after the other: there is no end of them
    body = busily if busy else {"prompt": prompt_of(999, SLOW_TOKENS)}
    hang_up(d.spec, body | {"max_tokens": 4000, "ignore_eos": True}, until=leave.is_set)


@contextlib.contextmanager
def reading(p, decoders, prompts, reference):
    """Each decode engine is in the middle of its transfer when the block begins, and P is stopped; the answers to come.

    A stopped P is what keeps a transfer from ending: its end of the connection does not answer.
    """
    for d in decoders:  # they have met: the transfer begins at once
        warm = prompt_of(next(_fresh), 40)
        assert text_of(decode(d.spec, warm, prefill(p.spec, warm))) == plain(reference, warm)
    params = [prefill(p.spec, prompt) for prompt in prompts]
    with ThreadPoolExecutor(len(decoders)) as pool, p.frozen():
        answers = [
            pool.submit(decode, d.spec, prompt, offer)
            for d, prompt, offer in zip(decoders, prompts, params, strict=True)
        ]
        for d in decoders:
            wait_until(lambda d=d: d.now(BORROWING) == 1, seconds=LONG, what=f"{d.spec.name} reads")
        time.sleep(0.3)
        yield answers


def hang_up(spec, body, patience=0.0, *, after=None, until=None):
    """Send a completion request and close the connection, ``patience`` seconds after what is waited for.

    That is that some bytes have come (``after``), or that something is so (``until``).
    """
    raw = json.dumps({"model": "tiny", "temperature": 0, **body}).encode()
    lines = (
        "POST /v1/completions HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(raw)}",
    )
    with socket.create_connection((spec.host, spec.port), timeout=LONG) as client:
        client.sendall("\r\n".join((*lines, "", "")).encode() + raw)
        seen = b""
        while after is not None and after not in seen and (data := client.recv(4096)):
            seen += data
        if until is not None:
            wait_until(until, seconds=180, what="the client may leave")
        time.sleep(patience)

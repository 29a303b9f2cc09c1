"""Faults without end between engines with caches of every kind that vLLM has: is a byte ever wrong?

``make soak-kinds MINUTES=30``. Each story has a prefill and a decode engine of one kind
(``support/kinds_table.py``), or whose ranks divide a context
(``support/divided_kinds.py``), in processes of their own (``support/kinds_process.py``): vLLM's
scheduler, our whole connector, real NIXL over TCP, and a played model that compares every byte
which a kernel would read. Prompts with common beginnings come by pull and push. Meanwhile engines
are frozen, past their leases and while KV moves, and killed; connections are broken, NIXL's too;
clients leave; and small caches have leases revoked and blocks used again. Afterwards nothing may be
held.
"""

import argparse
import dataclasses
import os
import random
import time
import warnings
from collections import Counter

# Engines that lose each other have much to say. Tests that import this module read vLLM's log.
if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from support.cache_kinds import CONTEXT, next_token
    from support.divided_kinds import PAIRS
    from support.kinds_process import LEASE, TRANSFER, KindsProcess, heard
    from support.kinds_table import KINDS

from benchmarks import page
from support.cluster import free_ports

REQUESTS = 30  # of a story
SOON = 90.0  # s in which all blocks are free
LONGEST = 45.0  # s in which all requests end once nothing is broken any more
FAULTS = (
    "freeze", "freeze", "late read", "late fence", "late fence", "cut side channel", "cut all", "kill", "leave",
)  # fmt: skip
FOREVER = 1e9  # s
TRIES = 20  # of a request whose engines die
NUMBERS = (
    "loads", "loads_failed_timeout", "loads_failed_lease", "loads_failed_peer", "loads_failed_transfer",
    "reads_discarded", "leases_revoked", "leases_expired", "leases_peer_lost", "loads_skipped_lease_lost",
)  # fmt: skip


CUTS = ("cut side channel", "cut all")  # for which ``ss -K`` needs CAP_NET_ADMIN


WITHOUT_CUTS = tuple(fault for fault in FAULTS if fault not in CUTS)


class Request:
    """What a client wants, and what it has got."""

    def __init__(self, name, prompt, most, mode):
        self.name = name
        self.prompt = prompt
        self.most = most
        self.mode = mode
        self.tries = 0
        self.said = []
        self.is_prefilled = False

    @property
    def id(self):
        return f"{self.name}.{self.tries}"

    @property
    def is_done(self):
        return len(self.said) == self.most

    def is_at(self, role):
        """Whether it is lost with an engine: P has no part in it once D knows what to load."""
        if role == "d":
            return self.mode != "p"
        return self.mode == "p" or (self.mode != "d" and not self.is_prefilled)


class Story:
    """Two engines, their clients, and what goes wrong."""

    def __init__(self, p, d, seed):
        self.dice = random.Random(seed)
        self.counts = Counter()
        self.requests = {}
        self.ports = dict(zip("pd", free_ports(2), strict=True))
        self.shapes = {"p": p, "d": d}
        self.lives = Counter()
        self.engines = {}
        for role in "pd":
            self._start(role)
        self.thaw_at = {}  # role -> when its engine goes on
        self.late = ""  # what goes wrong with the next read
        self.due = []  # reads with which it does: (what, request, which try, its params)
        self.looks = {}  # role -> what its engine says of itself

    def _start(self, role):
        """An engine that is started again has another id, at the same port."""
        self.lives[role] += 1
        name = f"{role}{self.lives[role]}"
        self.engines[role] = KindsProcess(name, self.ports[role], self.shapes[role])

    def play(self):
        trunk = [self.dice.randrange(3) for _ in range(CONTEXT)]
        forks = [self.dice.randrange(70) for _ in range(3)]
        for number in range(REQUESTS):
            own = [self.dice.randrange(3) for _ in range(self.dice.randrange(1, 20))]
            prompt = trunk[: self.dice.choice(forks)] + own
            most = min(self.dice.randrange(1, 12), CONTEXT - len(prompt))
            mode = self.dice.choice(("pull", "pull", "push", "push", "d", "p"))
            self._ask(Request(f"r{number}", prompt, most, mode))
            self._listen(self.dice.choice((0.0, 0.0, 0.05, 0.3)))
            if self.dice.randrange(4) == 0:
                self._break(self.dice.choice(FAULTS if os.geteuid() == 0 else WITHOUT_CUTS))
            while self.due:
                self._be_late(*self.due.pop())
        for role in list(self.thaw_at):
            self._thaw(role)
        self.late = ""
        if not self._have_ended(LONGEST):
            self._restart_starved()
        assert self._have_ended(SOON), f"texts are missing\n{self._look()}"
        end = time.monotonic() + SOON
        while not self._is_at_rest():
            assert time.monotonic() < end, f"something is held\n{self._look()}"
            self._listen(0.1)

    def _have_ended(self, seconds):
        """Wait for all texts, at most so long."""
        end = time.monotonic() + seconds
        while not all(each.is_done for each in self.requests.values()):
            if time.monotonic() >= end:
                return False
            self._listen(0.1)
        return True

    def _restart_starved(self):
        """NIXL may never say that a read is over whose connection broke: its blocks stay pinned."""
        _, looks = self._look()
        if looks.get("d", {}).get("starves"):
            self.counts["D restarted: all its blocks in quarantine"] += 1
            self._again("d")

    def close(self):
        for engine in self.engines.values():
            engine.kill()

    # ---- requests

    def _ask(self, request):
        """What a router does with a request: both legs, one after the other or at once."""
        self.requests[request.name] = request
        request.tries += 1
        assert request.tries < TRIES, f"{request.name} never ends"
        request.said = []
        request.is_prefilled = False
        p = self.engines["p"]
        d = self.engines["d"]
        if request.mode in ("p", "d"):
            self.engines[request.mode].order("ask", request.id, request.prompt, request.most, None)
            request.is_prefilled = True
            return
        params = {
            "do_remote_decode": True,
            "transfer_id": request.id,
            "transfer_mode": request.mode,
        }
        p.order("ask", f"p-{request.id}", request.prompt, 1, params)
        if request.mode == "push":
            where = {"remote_engine_id": p.agent, "remote_host": "127.0.0.1", "remote_port": p.port}
            where |= {"do_remote_prefill": True, "transfer_id": request.id, "transfer_mode": "push"}
            d.order("ask", request.id, request.prompt, request.most, where)

    def _hear(self, engine, said, content):
        role = engine.name[0]
        match said:
            case "output":
                self._output(*content)
            case "died":
                self.counts[f"died of {content}"] += 1
                self._again(role)
            case "wrong":
                raise AssertionError(f"engine {engine.name}:\n{content}")
            case "look":
                self.looks[role] = content
            case "loaded":
                self.counts["requests loaded"] += content

    def _output(self, leg, tokens, end, params):
        name = leg.removeprefix("p-")
        request = self.requests.get(name.partition(".")[0])
        if request is None or request.id != name:
            return  # of an earlier try, or of a client that has left
        if leg.startswith("p-"):
            if end is not None and not request.is_prefilled:
                request.is_prefilled = True
                self._prefilled(request, params)
            return
        for token in tokens:
            assert token == next_token([*request.prompt, *request.said]), (
                f"{request.name} has another text"
            )
            request.said.append(token)

    def _prefilled(self, request, params):
        if request.mode == "push":
            return
        self.counts["not handed over"] += params is None
        if self.late:
            self.due.append((self.late, request, request.tries, params))
            self.late = ""
        else:
            self._ask_to_load(request, params)

    def _ask_to_load(self, request, params):
        self.engines["d"].order("ask", request.id, request.prompt, request.most, params)

    def _again(self, role):
        """An engine ends: another one takes its place, and gets what this one had."""
        self.thaw_at.pop(role, None)
        self.engines[role].kill()
        self._start(role)
        for request in self.requests.values():
            if not request.is_done and request.is_at(role):
                self._ask(request)

    # ---- what goes wrong

    def _break(self, fault):
        self.counts[fault] += 1
        role = self.dice.choice("pd")
        match fault:
            case "freeze":
                self._freeze(role, self.dice.choice((0.3, 1.0, LEASE + 2)))
            case "late read" | "late fence":
                self.late = fault  # of whatever is read next
            case "cut side channel":
                self.engines[role].order("cut", False)
            case "cut all":
                self.engines[role].order("cut", True)
            case "kill":
                self._again(role)
            case "leave":
                self._leave()

    def _be_late(self, what, request, tried, params):
        """Have a read last until D has given it up, or D ask P when the lease is long over.

        Meanwhile the blocks that are read, there or here, get other owners.
        """
        role = "p" if what == "late read" else "d"
        seconds = TRANSFER + 1 if role == "p" else LEASE + 1
        if role == "p":
            self._freeze(role, FOREVER)
        if request.tries == tried and request.name in self.requests:  # else it begins anew
            self._ask_to_load(request, params)
        if role == "d":
            self._listen(self.dice.random() * 0.02)
            self._freeze(role, FOREVER)
        self._listen(seconds)
        other = "d" if role == "p" else "p"
        asked = self._use_again(other)
        if role in self.thaw_at:
            self._thaw(role)
        self._listen(0.3)
        for each in reversed(asked):  # what is in those blocks now is read, if it is still cached
            self._ask(Request(f"{each.name}a", [*each.prompt, 1], 1, other))

    def _use_again(self, role):
        """Have an engine use all of its free blocks; return the prompts that are in them."""
        asked = []
        while len(asked) < 10:
            prompt = [self.dice.randrange(3) for _ in range(80)]
            asked.append(Request(f"u{self.counts['blocks used again']}", prompt, 2, role))
            self.counts["blocks used again"] += 1
            self._ask(asked[-1])
        end = time.monotonic() + 10
        while time.monotonic() < end and not all(each.is_done for each in asked):
            self._listen(0.05)
        return asked

    def _leave(self):
        living = [each for each in self.requests.values() if not each.is_done]
        if living:
            request = self.dice.choice(living)
            del self.requests[request.name]
            for role, leg in (("p", f"p-{request.id}"), ("p", request.id), ("d", request.id)):
                self.engines[role].order("abort", leg)

    def _freeze(self, role, seconds):
        if role not in self.thaw_at and self.engines[role].process.is_alive():
            self.engines[role].freeze()
            self.thaw_at[role] = time.monotonic() + seconds

    def _thaw(self, role):
        del self.thaw_at[role]
        self.engines[role].thaw()

    # ---- time

    def _listen(self, seconds):
        """Hear what engines say for so long, and thaw those whose time it is."""
        until = time.monotonic() + seconds
        while True:
            for role, when in list(self.thaw_at.items()):
                if time.monotonic() >= when:
                    self._thaw(role)
            left = until - time.monotonic()
            for engine, said, content in heard(
                list(self.engines.values()), max(0.0, min(left, 0.05))
            ):
                if self.engines.get(engine.name[0]) is engine:
                    self._hear(engine, said, content)
            if left <= 0:
                return

    def _look(self):
        """Return what both engines say of themselves."""
        self.looks = {}
        for engine in self.engines.values():
            engine.order("look")
        end = time.monotonic() + 10
        while len(self.looks) < 2 and time.monotonic() < end:
            self._listen(0.02)
        waiting = {each.id: each.mode for each in self.requests.values() if not each.is_done}
        return waiting, self.looks

    def _is_at_rest(self):
        self._look()
        is_at_rest = len(self.looks) == 2 and all(look["at rest"] for look in self.looks.values())
        for look in self.looks.values() if is_at_rest else ():
            self.counts["blocks in quarantine at the end"] += look["quarantined"]
            self.counts["tokens computed"] += look["computed"]
            self.counts += Counter({name: look["counters"].get(name, 0) for name in NUMBERS})
        return is_at_rest


def shapes(name, dice):
    """Return both engines' caches: equal or not, large or so small that blocks are used again."""
    if name in PAIRS:
        return [dataclasses.replace(shape, blocks=dice.choice((56, 120))) for shape in PAIRS[name]]
    kind = KINDS[name]
    sizes = (4, 4) if kind.is_packed else dice.choice(((4, 4), (4, 8), (8, 4)))
    return [kind.shape(size, blocks=dice.choice((56, 120))) for size in sizes]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument(
        "--seed", type=int, default=random.randrange(10**6), help="of the first story"
    )
    parser.add_argument("--only", help="a word in the names of kinds")
    args = parser.parse_args(argv)
    page.end_as_by_ctrl_c()
    names = [name for name in (*KINDS, *PAIRS) if (args.only or "") in name]
    began = time.monotonic()
    total, stories = Counter(), Counter()
    seed = args.seed
    print(f"seed {seed}, {len(names)} kinds", flush=True)
    while time.monotonic() - began < args.minutes * 60:
        name = names[stories.total() % len(names)]
        story = Story(*shapes(name, random.Random(seed)), seed)
        try:
            story.play()
        except BaseException:
            print(f"{name}, seed {seed}: {dict(story.counts)}", flush=True)
            raise
        finally:
            story.close()
        stories[name] += 1
        seed += 1
        total += story.counts
        print(f"{time.monotonic() - began:6.0f} s {name}: {dict(story.counts)}", flush=True)
    print(
        f"\n{stories.total()} stories, {min(stories[each] for each in names)} or more of each kind; no wrong byte"
    )
    for name, count in sorted(total.items()):
        print(f"| {name} | {count:,} |")


if __name__ == "__main__":
    main()

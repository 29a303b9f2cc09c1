"""A lab of two "hosts" on one machine: network namespaces for a prefill and a decode engine, and a link to break.

::

    tests, router  -- management: a veth pair for each host, never limited, never cut -->  HTTP of the engines
    host p  ========== data: one veth pair, which can be limited, cut and healed ======== host d

Engines serve HTTP on ``host.mgmt_ip``; their side channel is at ``host.data_ip`` and NIXL's traffic on the device
:data:`DATA` (``engine_spec(name, model, **host.options)`` makes such an engine).

A cut is silent, as behind a router whose other side is gone: both ends keep their address, their route and a fixed
neighbour entry, but that entry names a MAC address nobody has. Packets leave and nobody takes them; no socket gets an
error before its own timeouts run out. (``tc netem loss`` would do, but not every kernel has it.)

It needs root, ``ip`` and ``tc``: ask :func:`lab_available`.
"""

import contextlib
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

PREFIX = "pdrelay-lab-"  # of namespaces: pdrelay-lab-<pid>-<slot>-<p or d>
LINK = "xl"  # of the management devices in the root namespace: xl<pid>-<slot><p or d>, 15 characters at most
DATA, MANAGEMENT = "data", "mgmt"  # devices inside the namespaces
SUBNET = "10.231"  # a lab has 10.231.<slot>.0/24: two networks of four addresses to its hosts, one between them
SLOTS = 250
NOBODY = "02:de:ad:00:00:00"  # the MAC address of a host that is cut off
TIMEOUT = 10  # s for any command of ours


@dataclass(frozen=True)
class Host:
    """One end of the data link."""

    name: str  # "p" or "d"
    namespace: str
    data_ip: str
    mgmt_ip: str

    @property
    def prefix(self) -> list[str]:
        """What to put before a command so that it runs on this host; its pid is the command's own."""
        return ["ip", "netns", "exec", self.namespace]

    def listening(self) -> set[tuple[str, int]]:
        """Return what is listened at here: IP addresses and ports."""
        lines = _do(*self.prefix, "ss", "-ltnH").splitlines()
        pairs = [line.split()[3].rpartition(":") for line in lines]
        return {(ip.strip("[]").removeprefix("::ffff:"), int(port)) for ip, _, port in pairs}

    @property
    def options(self) -> dict[str, object]:
        """What makes an engine run here and talk to other engines on the data link: fields of an ``EngineSpec``."""
        return {
            "host": self.mgmt_ip,
            "side_channel_host": self.data_ip,
            "prefix": tuple(self.prefix),
            "extra_env": {"UCX_TLS": "tcp"},
        }


class Lab:
    """Two hosts and their link. The link is whole and unlimited at first."""

    def __init__(self, slot: int) -> None:
        self._slot = slot
        names = {name: f"{PREFIX}{os.getpid()}-{slot}-{name}" for name in "pd"}
        self.p = Host("p", names["p"], f"{SUBNET}.{slot}.9", f"{SUBNET}.{slot}.2")
        self.d = Host("d", names["d"], f"{SUBNET}.{slot}.10", f"{SUBNET}.{slot}.6")
        self._macs: dict[str, str] = {}

    def limit(self, mbit: float | None) -> None:
        """Let so many megabits a second pass in each direction; None: as many as the machine can."""
        for host in (self.p, self.d):
            if mbit is None:
                _quietly("tc", "-n", host.namespace, "qdisc", "del", "dev", DATA, "root")
            else:
                # Burst: 10 ms of the rate, but never less than the largest piece that a veth passes on at once.
                burst = max(1 << 16, int(mbit * 1e6 / 8 * 0.01))
                rate = ("rate", f"{int(mbit * 1e6)}bit", "burst", f"{burst}b", "latency", "50ms")
                _do("tc", "-n", host.namespace, "qdisc", "replace", "dev", DATA, "root", "tbf", *rate)

    def cut(self) -> None:
        """Let no packet arrive any more, in either direction, without telling anybody."""
        self._point(dict.fromkeys("pd", NOBODY))

    def heal(self) -> None:
        """Undo :meth:`cut`. A limit stays as it is."""
        self._point(self._macs)

    def processes(self) -> list[int]:
        """Return the pids of what runs on the hosts."""
        return [pid for host in (self.p, self.d) for pid in _processes_in(host.namespace)]

    def build(self) -> None:
        """Make everything."""
        for host in (self.p, self.d):
            _do("ip", "netns", "add", host.namespace)
            _do("ip", "-n", host.namespace, "link", "set", "lo", "up")
        _do(
            *("ip", "link", "add", DATA, "netns", self.p.namespace, "type", "veth"),
            *("peer", "name", DATA, "netns", self.d.namespace),
        )
        for host, last in ((self.p, 1), (self.d, 5)):
            outside = self._outside(host)
            _do("ip", "link", "add", outside, "type", "veth", "peer", "name", MANAGEMENT, "netns", host.namespace)
            _do("ip", "addr", "add", f"{SUBNET}.{self._slot}.{last}/30", "dev", outside)
            _do("ip", "link", "set", outside, "up")
            for address, device in ((host.mgmt_ip, MANAGEMENT), (host.data_ip, DATA)):
                _do("ip", "-n", host.namespace, "addr", "add", f"{address}/30", "dev", device)
                _do("ip", "-n", host.namespace, "link", "set", device, "up")
        self._macs = {host.name: _mac(host) for host in (self.p, self.d)}
        self.heal()

    def remove(self) -> None:
        """Undo :meth:`build`, wherever it stopped. What still runs on the hosts goes on, without a network."""
        for host in (self.p, self.d):
            _quietly("ip", "link", "del", self._outside(host))
            _quietly("ip", "-n", host.namespace, "link", "del", DATA)
            _quietly("ip", "netns", "del", host.namespace)

    def _outside(self, host: Host) -> str:
        return f"{LINK}{os.getpid()}-{self._slot}{host.name}"

    def _point(self, macs: dict[str, str]) -> None:
        """Tell each host at which MAC address the other one is."""
        for host, other in ((self.p, self.d), (self.d, self.p)):
            entry = (other.data_ip, "lladdr", macs[other.name], "nud", "permanent", "dev", DATA)
            _do("ip", "-n", host.namespace, "neigh", "replace", *entry)


@contextlib.contextmanager
def open_lab() -> Generator[Lab]:
    """Give a lab; nothing of it survives the block. Leftovers of runs that were killed are removed first."""
    remove_leftovers()
    lab = Lab(_free_slot())
    try:
        lab.build()
        yield lab
    finally:
        lab.remove()


@contextlib.contextmanager
def lab_or_none() -> Generator[Lab | None]:
    """Give two hosts with a network between them that can be cut, or None where that cannot be had."""
    if lab_available():
        yield None
        return
    with open_lab() as lab:
        yield lab


def lab_available() -> str | None:
    """Return None if a lab can be made and limited here, or else why not."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"not installed: {', '.join(missing)}"
    try:
        with open_lab() as lab:
            lab.limit(100)
    except (subprocess.SubprocessError, OSError) as exc:
        return f"no network lab here: {getattr(exc, 'stderr', None) or exc}"
    return None


def remove_leftovers() -> None:
    """Remove what labs of processes that no longer exist have left: a test run that was killed."""
    for name in namespaces():
        if _is_dead(name.removeprefix(PREFIX).split("-")[0]):
            _quietly("ip", "-n", name, "link", "del", DATA)
            _quietly("ip", "netns", "del", name)
    for name in devices():
        if _is_dead(name.removeprefix(LINK).split("-")[0]):
            _quietly("ip", "link", "del", name)


def namespaces() -> list[str]:
    """Return the namespaces of all labs."""
    return [line.split()[0] for line in _do("ip", "netns").splitlines() if line.startswith(PREFIX)]


def devices() -> list[str]:
    """Return the management devices of all labs."""
    named = (link["ifname"] for link in json.loads(_do("ip", "-json", "link")))
    return [name for name in named if name.startswith(LINK) and name.removeprefix(LINK)[:1].isdigit()]


def _free_slot() -> int:
    """Return a slot whose addresses nobody has; runs side by side begin to look at different ones."""
    addresses = json.loads(_do("ip", "-json", "-4", "addr"))
    taken = {info["local"].rpartition(".")[0] for link in addresses for info in link.get("addr_info", ())}
    first = os.getpid() % SLOTS
    for slot in itertools.chain(range(first, SLOTS), range(first)):
        if f"{SUBNET}.{slot}" not in taken:
            return slot
    raise OSError(f"every network of {SUBNET} is in use")


def _mac(host: Host) -> str:
    return json.loads(_do("ip", "-n", host.namespace, "-json", "link", "show", DATA))[0]["address"]


def _processes_in(namespace: str) -> list[int]:
    return [int(pid) for pid in _do("ip", "netns", "pids", namespace).split()]


def _is_dead(pid: str) -> bool:
    return not Path("/proc", pid).exists()


def _do(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT).stdout


def _quietly(*command: str) -> None:
    """Run a command that may find nothing to do."""
    subprocess.run(command, check=False, capture_output=True, timeout=TIMEOUT)

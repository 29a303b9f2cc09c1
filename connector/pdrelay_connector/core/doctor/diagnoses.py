"""Derives findings from the facts about two ends: a table of diagnoses, one for each cause."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from pdrelay_connector.core.addresses import is_loopback
from pdrelay_connector.core.doctor.examination import EndFacts, Measurement
from pdrelay_connector.core.doctor.finding import Finding, refusal
from pdrelay_connector.core.doctor.pair_facts import End, PairFacts
from pdrelay_connector.core.doctor.ucx_log import is_over_tcp
from pdrelay_connector.core.lease.signatures import CLOCK_SKEW
from pdrelay_connector.core.session.data_plane import CUDA_IPC_READS
from pdrelay_connector.core.session.peers import mismatch

# times, in every round; other differences come and go with the load of a machine
SLOWER: Final = 2.0
CLOCK_WARNING: Final = CLOCK_SKEW / 10  # s: such a clock is not kept by NTP, and goes on to drift
# s for 10^9 bytes: a cache of 64 GB then delays the start by a minute
SLOW_REGISTRATION: Final = 1.0


def diagnose(facts: PairFacts) -> list[Finding]:
    """Return all findings about two ends; the gravest first."""
    return [finding for question in QUESTIONS for finding in question(facts)]


def _meeting(facts: PairFacts) -> Iterator[Finding]:
    if facts.connect_failure:
        yield refusal(facts.connect_failure)
    if facts.lost:
        yield Finding(
            "lost",
            f"the examination ended early: {facts.lost}",
            "look at the other end's output and try again",
        )


def _data_plane(facts: PairFacts) -> Iterator[Finding]:
    for end in ("here", "there"):
        failed = [
            measurement for measurement in _measurements_at(facts, end) if measurement.failure
        ]
        if failed:
            own_host, other_host = _names(facts, end)
            chosen = _end(facts, _opposite(end)).variable("UCX_NET_DEVICES") or "all"
            yield Finding(
                "data-plane",
                f"NIXL at {own_host} moves nothing to or from {other_host}: {failed[0].failure}",
                f"open the TCP ports of UCX of {other_host} in firewalls (UCX_TCP_PORT_RANGE=N-M "
                f"fixes them; UCX_NET_DEVICES is {chosen}), or set UCX_NET_DEVICES to an interface "
                "that this network leads to",
            )


def _way_back(facts: PairFacts) -> Iterator[Finding]:
    if facts.back_failure:
        own_host, other_host = _names(facts, "here")
        yield Finding(
            "blocked-port",
            f"{other_host} cannot connect to {own_host} at {facts.back_address}: {facts.back_failure}",
            f"open that port towards {own_host}: decode engines are dialled where return_kv is on or "
            f"roles change",
        )


def _memory(facts: PairFacts) -> Iterator[Finding]:
    """TCP between two ends of one machine."""
    there = facts.there
    if there is None or not facts.here.machine or facts.here.machine != there.machine:
        return
    used = (*facts.transports_here, *facts.transports_there)
    if not is_over_tcp(used):
        return
    what = (
        f"both ends run on one machine, and UCX moves bytes between them over TCP "
        f"({', '.join(used)})"
    )
    yield Finding("tcp-on-one-machine", what, _memory_mend(facts.here, there, used))


def _memory_mend(here: EndFacts, there: EndFacts, used: Sequence[str]) -> str:
    if any(use.startswith("WRITE cuda_ipc/") for use in used):
        for end in (here, there):
            reads = end.variable(CUDA_IPC_READS) or "auto"
            if reads not in {"on", "y", "yes", "1"}:
                return (
                    f"set {CUDA_IPC_READS}=on at {end.host} ({reads}): "
                    "UCX WRITEs over CUDA IPC, and does not READ so"
                )
    for end in (here, there):
        chosen = end.variable("UCX_TLS")
        if chosen is not None and not _allows_memory(chosen):
            return f"remove UCX_TLS={chosen} at {end.host} or add sm (and cuda_ipc for GPUs) to it"
    apart = [
        kind
        for kind, is_apart in (
            ("IPC", here.ipc_namespace != there.ipc_namespace),
            ("PID", here.pid_namespace != there.pid_namespace),
        )
        if is_apart
    ]
    if apart:
        docker = " ".join(f"--{kind.lower()} host" for kind in apart)
        pods = " and ".join(f"host{kind}" for kind in apart)
        return (
            f"give both containers one {' and one '.join(apart)} namespace (docker {docker}; "
            f"{pods} of pods, which the chart sets by engine.hostNamespaces)"
        )
    smallest = min(here, there, key=lambda end: end.shared_memory)
    if smallest.shared_memory < 64 << 20:
        free = smallest.shared_memory >> 20
        return (
            f"enlarge /dev/shm at {smallest.host}, of which {free} MiB are free "
            "(docker --shm-size, a Memory emptyDir)"
        )
    return (
        "allow process_vm_readv (CAP_SYS_PTRACE, or kernel.yama.ptrace_scope=0) and let UCX_TLS be "
        "unset at both"
    )


def _allows_memory(chosen: str) -> bool:
    """Whether a value of UCX_TLS allows shared memory; a list after ``^`` names forbidden ones."""
    names = {name.strip() for name in chosen.removeprefix("^").split(",")}
    memory = names & {"sm", "shm", "posix", "sysv", "cma", "knem", "xpmem", "mm"}
    return not memory if chosen.startswith("^") else bool(memory or "all" in names)


def _rdma(facts: PairFacts) -> Iterator[Finding]:
    there = facts.there
    if there is None or facts.here.machine == there.machine or not (facts.here.rdma and there.rdma):
        return
    used = (*facts.transports_here, *facts.transports_there)
    if is_over_tcp(used):
        yield Finding(
            "tcp-despite-rdma",
            f"both ends have active RDMA ports ({', '.join((*facts.here.rdma, *there.rdma))}) and "
            f"UCX uses {', '.join(used)}",
            "set UCX_TLS=rc,ud,self,sm,cuda_copy,cuda_ipc at both, and UCX_NET_DEVICES, if you set "
            "it, to those ports; containers need /dev/infiniband and an unlimited memlock",
        )


def _modes(facts: PairFacts) -> Iterator[Finding]:
    """Compare directions: KV goes from P to D, by D's READs in pull and by P's WRITEs in push."""
    for source in ("here", "there"):
        prefill, decode = _names(facts, source)
        read = facts.result_of(_opposite(source), "READ")
        write = facts.result_of(source, "WRITE")
        if read is None or write is None or read.measurement.failure or write.measurement.failure:
            continue
        rates = (
            f"READ (pull) moves {read.measurement.rate:.3g} GB/s from {prefill} to {decode}, "
            f"WRITE (push) {write.measurement.rate:.3g} GB/s"
        )
        if write.worst_rate > SLOWER * read.measurement.rate:
            yield Finding("read-slower", rates, f"set mode: push on both if {prefill} prefills")
        elif read.worst_rate > SLOWER * write.measurement.rate:
            yield Finding("write-slower", rates, f"set mode: pull on both if {prefill} prefills")


def _directions(facts: PairFacts) -> Iterator[Finding]:
    """One direction of the link slower than the other, whatever the operation."""
    out, out_worst = _rates(facts, "here")
    back, back_worst = _rates(facts, "there")
    here, there = _names(facts, "here")
    if not out or not back:
        return
    slow = min(out, back)
    fast = max(out, back)
    if max(out_worst, back_worst) > SLOWER * slow:
        source, target = (here, there) if out > back else (there, here)
        yield Finding(
            "asymmetric-link",
            f"bytes go from {source} to {target} at {fast:.3g} GB/s and the other way at "
            f"{slow:.3g} GB/s at best",
            f"mend the slow direction (routes, duplex, shaping, NIC), or let {source} prefill and "
            f"{target} decode: KV goes that way in pull and in push, so mode does not change it",
        )


def _clock(facts: PairFacts) -> Iterator[Finding]:
    if facts.clock is None or abs(facts.clock.seconds) - facts.clock.error <= CLOCK_WARNING:
        return
    here, there = _names(facts, "here")
    seconds = facts.clock.seconds
    order = "ahead of" if seconds > 0 else "behind"
    state = (
        "signed leases are refused from"
        if abs(seconds) > CLOCK_SKEW
        else "signed leases bear at most"
    )
    yield Finding(
        "clock",
        f"the clock of {there} is {abs(seconds):.3f} s {order} that of {here} (to within "
        f"{facts.clock.error:.3f} s), and {state} {CLOCK_SKEW:g} s",
        "let NTP (chrony, systemd-timesyncd) set both clocks",
    )


def _versions(facts: PairFacts) -> Iterator[Finding]:
    if (there := facts.there) is None:
        return
    for name, our, their in (
        ("pdrelay", facts.here.pdrelay, there.pdrelay),
        ("vLLM", facts.here.vllm, there.vllm),
        ("NIXL", facts.here.nixl, there.nixl),
        ("UCX", facts.here.ucx, there.ucx),
    ):
        if our and their and our != their:
            yield Finding(
                f"version-{name.lower()}",
                f"{name} is {our} at {facts.here.host} and {their} at {there.host}",
                f"install one version of {name} at both (engines with different vLLM versions "
                f"refuse each other)"
                if name == "vLLM"
                else f"install one version of {name} at both, from one image",
            )


def _fingerprint(facts: PairFacts) -> Iterator[Finding]:
    if facts.model_here is None or facts.model_there is None:
        return
    if reason := mismatch(facts.model_here, facts.model_there):
        here, there = _names(facts, "here")
        yield Finding(
            "fingerprint",
            f"engines at {there} and {here} would refuse each other: of {there}, {reason}",
            "start both engines with the same model, revision, types and connector mode",
        )


def _mtu(facts: PairFacts) -> Iterator[Finding]:
    there = facts.there
    if there is None or not facts.here.mtu or not there.mtu or facts.here.mtu == there.mtu:
        return
    yield Finding(
        "mtu",
        f"the MTU is {facts.here.mtu} at {facts.here.host} ({facts.here.interface}) and "
        f"{there.mtu} at {there.host} ({there.interface})",
        "set one MTU on both interfaces and on every switch between them (ip link set DEVICE mtu "
        "N)",
    )


def _registration(facts: PairFacts) -> Iterator[Finding]:
    for end in (facts.here, facts.there):
        if end is None or not end.memory_bytes:
            continue
        per_gigabyte = end.registration_seconds / end.memory_bytes * 1e9
        if per_gigabyte > SLOW_REGISTRATION and end.registration_seconds > 0.1:
            yield Finding(
                "registration",
                f"registering memory takes {per_gigabyte:.3g} s for each GB at {end.host}, so an "
                f"engine with a cache of 64 GB starts {64 * per_gigabyte:.0f} s later",
                "raise memlock (ulimit -l unlimited), use huge pages, and look for other load on "
                "that machine",
            )


def _loopback(facts: PairFacts) -> Iterator[Finding]:
    there = facts.there
    if (
        there is None
        or not there.address
        or facts.here.machine == there.machine
        or not is_loopback(there.address)
    ):
        return
    yield Finding(
        "loopback",
        f"the data plane of {there.host} is on {there.address}, and it is another machine",
        "set VLLM_NIXL_SIDE_CHANNEL_HOST there to the address that other machines reach",
    )


QUESTIONS: Final[Sequence[Callable[[PairFacts], Iterator[Finding]]]] = (
    _meeting, _loopback, _data_plane, _way_back, _fingerprint, _memory, _rdma, _modes, _directions, _clock, _versions,
    _mtu, _registration,
)  # fmt: skip


def _measurements_at(facts: PairFacts, end: str) -> list[Measurement]:
    return [result.measurement for result in facts.measurements if result.end == end]


def _opposite(end: End) -> End:
    return "there" if end == "here" else "here"


def _end(facts: PairFacts, end: End) -> EndFacts:
    return facts.there if end == "there" and facts.there is not None else facts.here


def _names(facts: PairFacts, end: End) -> tuple[str, str]:
    """Return the names of an end and of the other one: hosts, or addresses if these are equal."""
    there = facts.there or EndFacts(facts.address)
    ends = (facts.here, there) if end == "here" else (there, facts.here)
    if facts.here.host != there.host:
        return ends[0].host, ends[1].host
    names = {id(facts.here): f"here ({facts.here.address})", id(there): f"there ({facts.address})"}
    return names[id(ends[0])], names[id(ends[1])]


def _rates(facts: PairFacts, source: End) -> tuple[float, float]:
    """Return the best rate at which bytes leave an end, and the rate reached in every round.

    0: not known.
    """
    results = [
        result
        for result in (facts.result_of(source, "WRITE"), facts.result_of(_opposite(source), "READ"))
        if result is not None
    ]
    best = max((result.measurement.rate for result in results), default=0.0)
    return best, max((result.worst_rate for result in results), default=0.0)

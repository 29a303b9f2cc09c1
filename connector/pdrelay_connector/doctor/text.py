"""The report for people."""

from collections.abc import Iterable, Sequence

from pdrelay_connector.core.doctor.examination import EndFacts, Measurement, shortened
from pdrelay_connector.core.doctor.finding import Finding
from pdrelay_connector.core.doctor.pair_facts import PairFacts
from pdrelay_connector.doctor.engines import EngineFacts

UNKNOWN = "not known"


def pair_text(facts: PairFacts) -> str:
    """Write what was found out about two ends."""
    ends = [("here", facts.here), *([("there", facts.there)] if facts.there is not None else [])]
    lines = [line for name, end in ends for line in _end(name, end)]
    if facts.clock is not None:
        lines.append(
            f"clock  there is {facts.clock.seconds:+.4f} s (error {facts.clock.error:.4f} s)"
        )
    if facts.back_failure is not None:
        lines.append(f"back   {facts.back_address}: {shortened(facts.back_failure) or 'reached'}")
    if facts.measurements:
        lines += _table(facts)
    for name, used in (("here", facts.transports_here), ("there", facts.transports_there)):
        if facts.measurements:
            lines.append(f"UCX used {name}: {shortened(', '.join(used)) or UNKNOWN}")
    return "\n".join(lines)


def engine_text(facts: EngineFacts) -> str:
    """Write what an engine has shown."""
    head = f"engine {facts.engine or '(no id given)'} at {facts.address}: "
    if facts.failure:
        return head + facts.failure
    if facts.fingerprint is None:
        return (
            head
            + "reachable, TLS 1.3, secret accepted; give ENGINE_ID@HOST:PORT to see its fingerprint"
        )
    values = ", ".join(
        f"{name} {getattr(facts.fingerprint, name)}" for name in facts.fingerprint.__struct_fields__
    )
    shape = (
        f"{facts.stages} stages of {facts.ranks} ranks, {facts.layers} regions of {facts.blocks} "
        f"blocks of {facts.block_size} tokens in {facts.memory}"
    )
    return f"{head}reachable, TLS 1.3, secret proven by both\n  {shortened(values)}\n  {shape}"


def findings_text(findings: Sequence[Finding]) -> str:
    """Write the findings, or that there are none."""
    if not findings:
        return "no findings"
    return "\n".join(
        f"FINDING {finding.name}: {shortened(finding.sentence, 2048)}" for finding in findings
    )


def _end(name: str, end: EndFacts) -> Iterable[str]:
    versions = ", ".join(
        f"{what} {shortened(value)}"
        for what, value in (
            ("pdrelay", end.pdrelay),
            ("NIXL", end.nixl),
            ("UCX", end.ucx),
            ("vLLM", end.vllm),
        )
        if value
    )
    yield f"{name:<6} {shortened(end.host)}: {versions}"
    mtu = f"MTU {end.mtu}" if end.mtu else f"MTU {UNKNOWN}"
    rdma = f"RDMA {shortened(', '.join(end.rdma))}" if end.rdma else "no active RDMA port"
    yield (
        f"       {shortened(end.interface) or 'interface ' + UNKNOWN} {shortened(end.address)}, "
        f"{mtu}, {rdma}"
    )
    if end.memory_bytes:
        megabytes = end.memory_bytes / 1e6
        yield (
            f"       {megabytes:.0f} MB of {end.memory} registered in "
            f"{end.registration_seconds * 1e3:.1f} ms"
        )
    if end.environment:
        yield f"       {shortened(' '.join(end.environment))}"


def _table(facts: PairFacts) -> Iterable[str]:
    block = facts.measurements[0].measurement.block_bytes
    yield f"descriptors of {block} bytes"
    yield "operation        bytes go       GB/s   latency   posting of one   first contact"
    for result in facts.measurements:
        moves_out = (result.end == "here") == (result.measurement.operation == "WRITE")
        way = "here -> there" if moves_out else "there -> here"
        yield (
            f"{result.measurement.operation:<5} by {result.end:<6}  {way}  {_numbers(result.measurement)}"
        )


def _numbers(measured: Measurement) -> str:
    if measured.failure:
        return shortened(measured.failure)
    posting = measured.posting_seconds / measured.descriptors * 1e6 if measured.descriptors else 0.0
    return (
        f"{measured.rate:>7.3f}  {measured.latency_seconds * 1e6:>6.0f} us  {posting:>12.2f} us  "
        f"{measured.meeting_seconds * 1e3:>10.1f} ms"
    )

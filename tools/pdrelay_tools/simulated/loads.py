"""The loads of a pretended decode engine: whose KV cache it gets, and what it shows of that in its
metrics.
"""

from collections import Counter

from pdrelay_tools.simulated.rules import Json

SAID = "[::1]:5600 was not met: {}, it says"  # why a load has failed
# of a load, as it is counted: it takes no time
LOAD_BYTES = 2e6
LOAD_S = 0.001


class SimulatedLoads:
    """Loads succeed at once, but for those from ``unmet`` engines."""

    def __init__(self) -> None:
        # prefill engines by id, and why: handshake, secret, transfer or another of PairFailure
        self.unmet: dict[str, str] = {}
        # what it cannot load (kv_load_failure_policy); else such requests fail
        self.recomputes = True
        self.are_shown = False  # as our connector does, by prefill engine, and the engine's own id
        self.info = dict[str, str]()  # what more the connector says of itself, such as its kv_role
        # by the other engine's id: bytes of KV, and seconds for them
        self.moved = dict[str, tuple[float, float]]()
        self._counts = Counter[tuple[str, str]]()  # by prefill engine and outcome

    def load(self, body: Json) -> bool:
        """Load the KV cache of a request, and count that; False: it cannot, and does not compute
        the prompt either.
        """
        params: Json = body.get("kv_transfer_params") or {}
        peer = params.get("remote_engine_id") if params.get("do_remote_prefill") else None
        if peer is None:
            return True
        why = self.unmet.get(peer)
        self._counts[peer, why or "loaded"] += 1
        if why is None:
            moved, seconds = self.moved.get(peer, (0.0, 0.0))
            self.moved[peer] = moved + LOAD_BYTES, seconds + LOAD_S
        return why is None or self.recomputes

    def clear(self) -> None:
        """Count from zero, as after a restart."""
        self._counts.clear()
        self.moved.clear()

    def exposition(self, engine_id: str, labels: str) -> str:
        """Write what is shown, in Prometheus' words; ``labels``: those of all series."""
        if not self.are_shown:
            return ""
        failing = {peer for peer, outcome in self._counts if outcome != "loaded"}
        lines = [
            f'vllm:pdrelay_peer_loads_total{{{labels},peer="{peer}",outcome="{outcome}"}} '
            f"{count}.0\n"
            for (peer, outcome), count in self._counts.items()
            if peer in failing
        ]
        lines += [
            f'vllm:pdrelay_peer_failure{{{labels},outcome="{why}",peer="{peer}",reason="{SAID.format(why)}"}} 1.0\n'
            for peer, why in self.unmet.items()
            if peer in failing
        ]
        for peer, (moved, seconds) in self.moved.items():
            lines.append(f'vllm:pdrelay_peer_bytes_total{{{labels},peer="{peer}"}} {moved}\n')
            lines.append(
                f'vllm:pdrelay_peer_transfer_seconds_total{{{labels},peer="{peer}"}} {seconds}\n'
            )
        own = "".join(
            [f',{name}="{value}"' for name, value in {"engine_id": engine_id, **self.info}.items()]
        )
        return "".join([f"vllm:pdrelay_connector_info{{{labels}{own}}} 1.0\n", *lines])

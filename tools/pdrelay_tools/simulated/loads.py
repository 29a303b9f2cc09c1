"""The KV loads of a simulated decode engine, and their metrics."""

from collections import Counter

from pdrelay_tools.simulated.rules import Json

FAILURE_TEXT = "[::1]:5600 was not met: {}, it says"  # why a load has failed
# of a load, as it is counted: it takes no time
LOAD_BYTES = 2e6
LOAD_S = 0.001


class SimulatedLoads:
    """Loads succeed at once, except from ``unmet`` engines."""

    def __init__(self) -> None:
        # prefill engines by id, and the outcome: handshake, secret, transfer or another PairFailure
        self.unmet: dict[str, str] = {}
        # after a failed load (kv_load_failure_policy); otherwise such requests fail
        self.recomputes = True
        self.are_shown = False  # in the metrics, by prefill engine, as our connector does
        self.info = dict[str, str]()  # more labels of the connector's info metric, such as kv_role
        # by the other engine's id: bytes of KV, and seconds for them
        self.moved = dict[str, tuple[float, float]]()
        self._counts = Counter[tuple[str, str]]()  # by prefill engine and outcome

    def load(self, body: Json) -> bool:
        """Count the load of a request's KV; False: it failed, and the prompt is not recomputed."""
        params: Json = body.get("kv_transfer_params") or {}
        peer = params.get("remote_engine_id") if params.get("do_remote_prefill") else None
        if peer is None:
            return True
        reason = self.unmet.get(peer)
        self._counts[peer, reason or "loaded"] += 1
        if reason is None:
            moved, seconds = self.moved.get(peer, (0.0, 0.0))
            self.moved[peer] = moved + LOAD_BYTES, seconds + LOAD_S
        return reason is None or self.recomputes

    def clear(self) -> None:
        """Count from zero, as after a restart."""
        self._counts.clear()
        self.moved.clear()

    def exposition(self, engine_id: str, labels: str) -> str:
        """Return the metrics as Prometheus text; ``labels``: of all series."""
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
            f'vllm:pdrelay_peer_failure{{{labels},outcome="{outcome}",peer="{peer}",'
            f'reason="{FAILURE_TEXT.format(outcome)}"}} 1.0\n'
            for peer, outcome in self.unmet.items()
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

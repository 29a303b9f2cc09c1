"""Sees in the metrics of decode engines which of them have no KV room left."""

from collections.abc import Sequence

from pdrelay_proxy.core.fleet.engine_metrics import ShownLoad, shown_load
from pdrelay_proxy.core.fleet.registry import Registry
from pdrelay_proxy.core.model import Instance, InstanceId
from pdrelay_proxy.features.moving_streams.core.kv_relief import KvRelief


class KvWatch:
    """Implements MetricsListener: what all engines show that serve is looked at once a round."""

    def __init__(self, registry: Registry, relief: KvRelief) -> None:
        self._registry = registry
        self._relief = relief
        self._loads: dict[InstanceId, ShownLoad] = {}  # of the round that is under way

    def decode_shown(self, decode: Instance, exposition: bytes, now: float, /) -> None:
        """Take in how busy an engine is; with ranks the load is that of all of them together."""
        member = self._registry.get(decode.id)
        if member is None or decode.rank is not None or not member.life.may_serve(now=now):
            return
        load = shown_load(exposition, now=now)
        if load is not None:
            self._loads[decode.id] = load

    def prefills_to_read(self, _now: float, /) -> Sequence[Instance]:
        """Return none: prefill engines have no streams."""
        return ()

    def prefill_shown(self, prefill: Instance, exposition: bytes, /) -> None:
        """None is read."""

    def round_over(self) -> Sequence[Instance]:
        """See which engines are full; whether prefill engines were restarted is not known here."""
        loads = self._loads
        self._loads = {}
        self._relief.take_loads(loads)
        return ()

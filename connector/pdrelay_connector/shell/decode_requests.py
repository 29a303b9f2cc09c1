"""The requests whose prompts other engines prefill: loads, and the quarantine of failed ones.

Everything here runs on the engine thread, which owns vLLM's block pool.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from pdrelay_connector.core.addresses import is_own_host
from pdrelay_connector.core.counters import CLOCK, LOADED, SECRET, UNREACHABLE, Counters
from pdrelay_connector.core.ids import EngineId, RequestId
from pdrelay_connector.core.lease.kv_params import REFUSALS, PullParams, PushParams, says_push
from pdrelay_connector.core.lease.signatures import Signatures
from pdrelay_connector.core.messages import MAX_ID
from pdrelay_connector.core.results import HandshakeEnded, LoadResult, PeerLost
from pdrelay_connector.errors import (
    AdapterMismatch,
    ExpiredKvParams,
    ForgedKvParams,
    InvalidKvParams,
    UnsignedKvParams,
)
from pdrelay_connector.settings import Mode
from pdrelay_connector.shell.block_shortage import has_blocks, takes_the_last_blocks
from pdrelay_connector.shell.control_thread import ControlCommand, Post
from pdrelay_connector.shell.decode_modes import PullDecode, PushDecode
from pdrelay_connector.shell.engine_config import EngineConfig
from pdrelay_connector.shell.met_engines import MetEngines
from pdrelay_connector.shell.metadata import StepMetadata, WorkerMetadata
from pdrelay_connector.shell.offloaded_blocks import OffloadedBlocks
from pdrelay_connector.shell.partial_blocks import PartialBlocks
from pdrelay_connector.shell.quarantine import Quarantine
from pdrelay_connector.shell.shared_prompts import SharedPrompts
from pdrelay_connector.shell.timeline_notes import Clock

logger = init_logger("vllm.pdrelay")

_CAUSES: Final[Mapping[type[InvalidKvParams], str]] = {
    UnsignedKvParams: SECRET,
    ForgedKvParams: SECRET,
    ExpiredKvParams: CLOCK,
    AdapterMismatch: "adapter",
}


@dataclass(slots=True)
class _RemotePrefill:
    """A request here whose prompt another engine has computed."""

    source: PullParams | PushParams
    is_handshake_over: bool  # False: a handshake may show that its engine's KV cannot be loaded
    failure: str = ""  # of that handshake
    # its blocks are allocated and its load has begun; a request is never loaded twice
    loading: bool = False
    into: Sequence[int] = ()  # the blocks it is loaded into
    is_compared: bool = False  # by the workers, after a push: only then it counts as loaded


class DecodeRequests:
    """The decode side of the scheduler. ``wall_clock`` is in seconds since the epoch."""

    def __init__(
        self,
        engine_config: EngineConfig,
        mode: Mode,
        post: Post,
        *,
        pool: Callable[[], BlockPool],
        counters: Counters,
        signatures: Signatures,
        wall_clock: Clock,
        live: Callable[[], Iterable[Request]],
        offloaded: OffloadedBlocks,
        on_skipped: Callable[[str, str], None] = lambda _request, _cause: None,
    ) -> None:
        """``live`` returns the requests here.

        ``on_skipped`` gets each request whose load does not begin, and the cause of metrics.
        """
        self._on_skipped = on_skipped
        self._engine_config = engine_config
        self._offloaded = offloaded
        self._post = post
        self._pool = pool
        self._live = live
        self._counters = counters
        self._remote_prefills: dict[RequestId, _RemotePrefill] = {}
        self._shared = SharedPrompts()
        self.met = MetEngines()
        self._quarantined = Quarantine(pool)
        self._partial = PartialBlocks(engine_config.groups)
        self._mode = mode
        # in push, of KV of earlier answers alone
        self._pull_decode = PullDecode(engine_config, signatures, wall_clock)
        self._push_decode = PushDecode(engine_config, post, offloaded)
        # loads that ended since the last step, for the workers to report to vLLM
        self._arrived: list[LoadResult] = []
        self._is_consumer = engine_config.is_consumer
        self._has_had_params = False
        self._has_named_alone = False  # a request without params, in the log
        self._has_named_own_host = False  # of an engine that was not met there, in the log

    def bind_block_pool(self, pool: BlockPool) -> None:
        """Keep blocks that loads fill in part out of the pool's prefix cache."""
        self._partial.keep_out_of(pool)

    def begin_alone(self, request: Request) -> None:
        """Count a request without params.

        A router that loses them is only noticed here: the texts are right.
        """
        if not self._is_consumer:
            return
        self._counters.count("requests_without_kv_params")
        if self._has_had_params and not self._has_named_alone:
            self._has_named_alone = True
            logger.info(
                "pdrelay: %s came without kv_transfer_params, and others came with them: this "
                "engine computes its prompt. Its router serves it by one engine, or loses the "
                "params. This is said once; vllm:pdrelay_requests_without_kv_params counts them",
                request.request_id,
            )

    def begin(self, request: Request, params: Mapping[str, Any]) -> None:
        """Start to renew the lease of a new request.

        Invalid params cost a local prefill, never a wrong text.
        """
        own = RequestId(request.request_id)
        self._has_had_params = True
        try:
            source = self._read(request, params)
        except InvalidKvParams as exc:
            self._refuse(own, params, exc)
            return
        if self._shared.joins(request, source):
            self._counters.count("loads_shared")
            return
        engine = source.remote_engine_id
        handshake = self.met.get(engine)
        is_handshake_over = handshake is not None
        self._remote_prefills[own] = _RemotePrefill(source, is_handshake_over)
        self._post(lambda control, now: control.lease_renewer.start_renewing(own, source, now=now))
        if handshake is not None and handshake.objection:
            self._skip_incompatible(own, handshake)
        elif not is_handshake_over:
            self._post(lambda control, now: control.lease_renewer.report_handshake(engine, now=now))

    def _refuse(self, own: RequestId, params: Mapping[str, Any], error: InvalidKvParams) -> None:
        """A request loads nothing.

        Another secret, or clock, than its engine's concerns every request of both.
        """
        self._counters.count(REFUSALS[type(error)])
        logger.warning("pdrelay: %s computes its own prompt: %s", own, error)
        cause = _CAUSES.get(type(error), "params")
        engine = params.get("remote_engine_id")
        if cause in (SECRET, CLOCK) and isinstance(engine, str) and len(engine) <= MAX_ID:
            self._counters.count_peer_load(cause, engine)
        self._on_skipped(own, cause)

    def _read(self, request: Request, params: Mapping[str, Any]) -> PullParams | PushParams:
        if self._mode is Mode.PUSH or (self._mode is Mode.AUTO and says_push(params)):
            return self._push_decode.read(request, params)
        return self._pull_decode.read(request, params)

    def begin_found(self, own: RequestId, params: PullParams) -> None:
        """Load a prompt's beginning, which a decode engine has leased us from its prefix cache."""
        self._remote_prefills[own] = _RemotePrefill(params, is_handshake_over=True)
        self._post(lambda control, now: control.lease_renewer.start_renewing(own, params, now=now))

    def _awaits_other(self, own: RequestId) -> bool:
        """Tell whether another request still loads this one's prompt.

        vLLM enters the blocks into its prefix cache when it takes the loader up again.
        """
        loader = self._shared.loader_of(own)
        return loader is not None and (
            RequestId(loader.request_id) in self._remote_prefills
            or loader.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        )

    def handshake_ended(self, ended: HandshakeEnded) -> None:
        """Let the requests of an engine begin their loads, or compute their own prompts if it is
        incompatible.

        With ``kv_load_failure_policy: fail`` each load of such an engine would end its request with
        an error. The loads of an engine that does not answer end so: the workers do not wait for it
        again.
        """
        self.met.add(ended)
        for own, remote_prefill in list(self._remote_prefills.items()):
            if (
                remote_prefill.is_handshake_over
                or remote_prefill.source.remote_engine_id != ended.engine
            ):
                continue
            remote_prefill.is_handshake_over = True
            remote_prefill.failure = ended.failure
            if ended.is_absent:
                self._name_own_host(remote_prefill.source)
            if ended.objection:
                self._skip_incompatible(own, ended)

    def _name_own_host(self, source: PullParams | PushParams) -> None:
        """Log once how to configure an engine elsewhere if its host is ``localhost``."""
        if self._has_named_own_host or not is_own_host(source.remote_host):
            return
        self._has_named_own_host = True
        logger.warning(
            "pdrelay: engine %s says that it is at %s, which is this machine, and it is not there. "
            "If it is on another machine, set VLLM_NIXL_SIDE_CHANNEL_HOST on it to an address at "
            "which this one reaches it. This is said once",
            source.remote_engine_id,
            source.address,
        )

    def peer_changed(self, news: HandshakeEnded | PeerLost) -> None:
        """Handle the end of a handshake, or of a connection: then the next request reconnects."""
        if isinstance(news, PeerLost):
            self.met.lose(news.engine)
        else:
            self.handshake_ended(news)

    def _skip_incompatible(self, own: RequestId, handshake: HandshakeEnded) -> None:
        source = self._remote_prefills[own].source
        self._release_lease(own)
        self._counters.count_load(
            "loads_skipped_incompatible", source.remote_engine_id, cause=handshake.cause
        )
        self._on_skipped(own, handshake.cause or "refused")
        logger.warning(
            "pdrelay: %s computes its own prompt: %s was not met: %s",
            own,
            source.address,
            handshake.objection,
        )

    def matched_tokens(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond ``computed`` will be loaded, and whether asynchronously.

        None: during the first handshake with the engine, or while another request loads the prompt.
        """
        own = RequestId(request.request_id)
        remote_prefill = self._remote_prefills.get(own)
        if remote_prefill is None:
            return (None, False) if self._awaits_other(own) else (0, False)
        if remote_prefill.loading:
            return 0, False
        end = self._loaded_tokens(request, remote_prefill.source)
        missing = end - computed
        if missing <= 0:
            return 0, False
        waits = takes_the_last_blocks(
            self._pool(), self._engine_config.groups, request, computed, end
        ) and any(map(has_blocks, self._live()))  # leases alone are revoked if it lacks a block
        return (missing, True) if remote_prefill.is_handshake_over and not waits else (None, False)

    def is_meeting(self, request: Request) -> bool:
        """Tell whether a request waits for the first handshake with its engine."""
        remote_prefill = self._remote_prefills.get(RequestId(request.request_id))
        return remote_prefill is not None and not remote_prefill.is_handshake_over

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """Order the load of ``external`` tokens into the request's blocks."""
        own = RequestId(request.request_id)
        remote_prefill = self._remote_prefills.get(own)
        if remote_prefill is None or remote_prefill.loading:
            return
        if external == 0:
            self._counters.count("loads_skipped_local")
            self._release_lease(own)
            return
        remote_prefill.loading = True  # it ends in loads_ended()
        if remote_prefill.failure:
            failure = f"{remote_prefill.source.address} was not met: {remote_prefill.failure}"
            self._counters.count_load(
                "loads_failed_handshake", remote_prefill.source.remote_engine_id
            )
            self._on_skipped(own, UNREACHABLE)
            logger.warning("pdrelay: the load of %s failed: %s", own, failure)
            self._arrived.append(LoadResult(own, failure))
            engine = remote_prefill.source.remote_engine_id
            # no load of ours ends it
            self._post(lambda control, _: control.lease_renewer.release(own, engine))
            return
        source = remote_prefill.source
        tables = blocks.get_block_ids()
        self._offloaded.allocated(tables)
        tokens = self._loaded_tokens(request, source)
        sizes: Sequence[int] = ()  # of P's blocks by group; in push, workers exchange them
        if isinstance(source, PullParams):
            into = self._pull_decode.start(request, source, tokens, external, tables)
            sizes = self._pull_decode.sizes(source)
            # in push, our registration tells P the same
            self._post(
                lambda control, _: control.lease_renewer.read_started(own, source.remote_engine_id)
            )
        else:
            into = self._push_decode.start(request, source, tokens, external, tables)
        remote_prefill.into = into
        before = self._partial.loading(own, tables, tokens, external, sizes)
        if before < tokens:
            self._offloaded.leave_out(own, before)

    def metadata(self, output: SchedulerOutput) -> StepMetadata:
        """Return this step's metadata for the workers."""
        arrived = self._arrived
        self._arrived = []
        return StepMetadata(
            self._pull_decode.take_orders(),
            idle=output.total_num_scheduled_tokens == 0,
            arrived=arrived,
            deferred=self._push_decode.take_deferred(),
        )

    def _loaded_tokens(self, request: Request, source: PullParams | PushParams) -> int:
        """Return up to which token the prompt comes from its engine."""
        end = self._engine_config.loaded_tokens(request.num_prompt_tokens)
        return min(end, source.remote_num_tokens) if isinstance(source, PullParams) else end

    def loads_ended(self, requests: Iterable[str], failed: Container[str] = ()) -> None:
        """VLLM has received the end of these requests' loads from the workers
        (``finished_recving``).

        ``failed``: those that a rank has not loaded (``failed_recving``).
        """
        for request in requests:
            own = RequestId(request)
            if (remote_prefill := self._remote_prefills.pop(own, None)) is not None:
                source = remote_prefill.source
                if isinstance(source, PullParams):  # a push's end ends this, too
                    self._post(_stopping(own, source.remote_engine_id))
                if request in failed:
                    self._shared.loads_nothing(own)
                    # everything was written, so a rank has found it wrong
                    if remote_prefill.is_compared:
                        self._counters.count_load("loads_failed_wrong_kv", source.remote_engine_id)
                elif isinstance(source, PullParams):
                    self._counters.count_peer_load(LOADED, source.remote_engine_id)
                elif remote_prefill.is_compared:
                    self._counters.count_load("loads", source.remote_engine_id)

    def finished(self, request: Request) -> None:
        """Abort the load of a finished request, or drop its lease if its load has not begun."""
        own = RequestId(request.request_id)
        remote_prefill = self._remote_prefills.get(own)
        if remote_prefill is not None and not remote_prefill.loading:
            self._release_lease(own)
        elif remote_prefill is not None and isinstance(remote_prefill.source, PushParams):
            # a read ends by itself; vLLM keeps the blocks until then
            ended = self._push_decode.abort(own)
            if ended is not None:
                self._arrived.append(ended)
        self._partial.over(own)
        self._shared.finished(request)

    def lease_lost(self, own: RequestId) -> None:
        """Handle a lost lease: the request computes its own prompt, unless its load has begun.

        The fence decides about a load that has begun; in push, P's answer to our registration does.
        """
        remote_prefill = self._remote_prefills.get(own)
        if remote_prefill is None or remote_prefill.loading:
            return
        del self._remote_prefills[own]
        self._shared.loads_nothing(own)
        self._counters.count("loads_skipped_lease_lost")
        logger.warning(
            "pdrelay: %s computes its own prompt: %s has ended its lease",
            own,
            remote_prefill.source.address,
        )

    def push_ended(self, result: LoadResult, *, is_live: bool) -> None:
        """A push has ended; the workers report it to vLLM in the next step."""
        if result.failure:
            # an aborted request no longer needs its KV
            level = logger.warning if is_live else logger.debug
            level("pdrelay: the push of %s failed: %s", result.request, result.failure)
        if result.quarantined:
            self.update_quarantine(WorkerMetadata(quarantined=[result.request]))
        if (
            result.checks is not None
            and (remote_prefill := self._remote_prefills.get(result.request)) is not None
        ):
            remote_prefill.is_compared = True
        self._arrived.append(result)

    def update_quarantine(self, news: WorkerMetadata) -> None:
        """Pin blocks that NIXL may still write into, before vLLM frees them; unpin the others."""
        for own in news.quarantined:
            load = self._remote_prefills[own]
            self._quarantined.begin(own, load.into, is_read=isinstance(load.source, PullParams))
        for own in news.released:
            self._quarantined.end(own)

    def step_begun(self, deferred: Iterable[RequestId]) -> None:
        """The workers have begun the step in which these loads got their blocks."""
        self._push_decode.register(deferred)

    @property
    def has_pending(self) -> bool:
        """Whether the workers must report ended pushes to vLLM in the next step."""
        return bool(self._arrived)

    @property
    def awaits_quarantine(self) -> bool:
        """Whether only a step can end a quarantine."""
        return self._quarantined.awaits_step

    @property
    def loading(self) -> set[str]:
        """The requests with a load in progress."""
        return {
            str(own)
            for own, remote_prefill in self._remote_prefills.items()
            if remote_prefill.loading
        }

    def may_wait(self, *, is_searching: bool = False) -> bool:
        """Whether an idle step may wait for the control thread; ``is_searching``: for an answer.

        The control thread reports ended pushes. The workers report ended reads, with a step, so an
        engine that reads must step; it may wait for a handshake, and between two polls of
        quarantined blocks.
        """
        loading = [
            remote_prefill.source
            for remote_prefill in self._remote_prefills.values()
            if remote_prefill.loading
        ]
        if any(isinstance(source, PullParams) for source in loading):
            return False
        if self._push_decode.is_deferring:
            return False
        is_meeting = is_searching or any(
            not remote_prefill.is_handshake_over
            for remote_prefill in self._remote_prefills.values()
        )
        return bool(loading) or is_meeting or self.awaits_quarantine

    @property
    def gauges(self) -> dict[str, float]:
        """Current requests and quarantined blocks."""
        return {
            "requests_waiting_for_remote_kv": float(len(self._remote_prefills)),
            "blocks_quarantined": float(self._quarantined.blocks),
        }

    def _release_lease(self, own: RequestId) -> None:
        self._shared.loads_nothing(own)
        engine = self._remote_prefills.pop(own).source.remote_engine_id
        self._post(lambda control, _: control.lease_renewer.release(own, engine))


def _stopping(own: RequestId, engine: EngineId) -> ControlCommand:
    return lambda control, _: control.lease_renewer.stop_renewing(own, engine)

"""The requests that this engine prefills for decode engines: progress, leases, held blocks.

Everything here runs on the engine thread, which owns vLLM's block pool.
"""

from collections.abc import Callable, Mapping, Sequence
from math import ceil, inf
from typing import TYPE_CHECKING, Any, Final

from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.ids import BlockId, RequestId
from pdrelay_connector.core.lease.kv_params import PullParams, parse_transfer_id, says_push
from pdrelay_connector.core.lease.lease_table import LeaseEvent
from pdrelay_connector.core.lease.signatures import Signatures
from pdrelay_connector.core.lease.transfer_names import (
    TransferNames,
    abandoned_transfer,
    is_name,
    transfer_of,
)
from pdrelay_connector.core.messages import MAX_ID, RankSums
from pdrelay_connector.core.push.push_job import ComputedBlocks, TransferOver
from pdrelay_connector.core.verify.sampling import SampledBlock, Sampling
from pdrelay_connector.errors import InvalidKvParams
from pdrelay_connector.settings import Mode
from pdrelay_connector.shell.block_shortage import ShortageTimer, ShortRequest
from pdrelay_connector.shell.control_thread import ControlCommand, Post
from pdrelay_connector.shell.decode_modes import BlockTables
from pdrelay_connector.shell.engine_config import EngineConfig
from pdrelay_connector.shell.first_token import PARAM as FIRST_TOKEN
from pdrelay_connector.shell.held_blocks import HeldBlocks
from pdrelay_connector.shell.prompt_identity import adapter_of, digest, has_changed_adapter
from pdrelay_connector.shell.push_progress import PushProgress
from pdrelay_connector.shell.sliding_windows import NULL, SlidingWindowPins
from pdrelay_connector.shell.timeline_notes import Clock
from pdrelay_connector.shell.truncated_prompts import can_move, truncate

if TYPE_CHECKING:
    from pdrelay_connector.settings import Settings

# s, of the kv_transfer_params; routers read it, decode engines hear it when they meet
LEASE: Final = "pdrelay_lease"

logger = init_logger("vllm.pdrelay")


class PrefillRequests:
    """The prefill side of the scheduler. ``wall_clock`` is in seconds since the epoch."""

    def __init__(
        self,
        engine_config: EngineConfig,
        settings: "Settings",
        post: Post,
        *,
        pool: Callable[[], BlockPool],
        counters: Counters,
        signatures: Signatures,
        wall_clock: Clock,
    ) -> None:
        self._engine_config = engine_config
        self.engine = engine_config.engine  # in its present generation
        self._settings = settings
        self._post = post
        self._pool = pool
        self._counters = counters
        self._signatures = signatures
        self._wall_clock = wall_clock
        self._held_blocks = HeldBlocks()  # by the name that decode engines know
        self._transfers = TransferNames()
        # by vLLM's id of the request; of those whose answer has not left the engine yet
        self._new_leases: dict[str, RequestId] = {}
        self._window_pins = SlidingWindowPins(engine_config.groups, pool)
        self._sampling = Sampling(settings.verify_share, settings.verify_blocks)
        # in pull: for the workers' next step
        self._sampled: dict[RequestId, tuple[SampledBlock, ...]] = {}
        self._has_named_role = False  # of an engine that lends nothing, in the log
        self._shortage = ShortageTimer(settings.revoke_after or inf)
        self._push_progress = PushProgress(engine_config.groups)

    def begin(self, request: Request, params: Mapping[str, Any]) -> None:
        """Truncate a new request if need be, and start its transfer, in push.

        A request without a valid transfer id is not handed over.
        """
        left_out = self._engine_config.left_out_tokens
        if not self._engine_config.is_producer or not can_move(request, left_out):
            return  # _hand_over() says why
        truncate(request, left_out)
        # read before anything is computed with it: a change until the end is noticed
        adapter_of(request)
        if not self._is_pushed(params):
            return
        try:
            name = parse_transfer_id(params, request.request_id)
        except InvalidKvParams as exc:
            self._counters.count("transfer_ids_invalid")
            logger.warning("pdrelay: %s is not handed over: %s", request.request_id, exc)
            return
        if name in self._push_progress or name in self._held_blocks:
            self._counters.count("transfer_ids_duplicate")
            logger.warning(
                "pdrelay: %s is not handed over: there is a transfer %s already",
                request.request_id,
                name,
            )
            return
        self._push_progress.begin(request, name, digest(request, request.num_prompt_tokens))

    def abandon(self, request: Request, params: Mapping[str, Any]) -> None:
        """Free the blocks of another request if this one says that no engine will read them."""
        try:
            transfer = abandoned_transfer(params)
        except InvalidKvParams as exc:
            self._counters.count("transfer_ids_invalid")
            logger.warning("pdrelay: %s abandons nothing: %s", request.request_id, exc)
            return
        if transfer is None or not self._engine_config.is_producer:
            return
        self._counters.count("transfers_abandoned")
        if leases := self._transfers.abandon(transfer):
            self._post(lambda control, _: control.abandon(leases))

    def step(self, output: SchedulerOutput, live: Mapping[str, Request]) -> None:
        """Pin windows that vLLM would free too early."""
        self._window_pins.step(output, live)

    def take_computed(self, output: SchedulerOutput) -> list[ComputedBlocks | TransferOver]:
        """Return the blocks to push, and the transfers that have ended; empty in pull."""
        return self._push_progress.take_computed(output)

    def take_sampled(self) -> dict[RequestId, tuple[SampledBlock, ...]]:
        """Return the blocks whose checksums the workers must take before their next step (pull)."""
        sampled = self._sampled
        self._sampled = {}
        return sampled

    def add_sums(self, sums: Mapping[RequestId, Sequence[RankSums]]) -> None:
        """Pass the workers' checksums on to the readers of these leases."""
        for name, its in sums.items():
            self._post(_adding(name, its))

    def give_up(self, request: Request) -> None:
        """End the push of a request that has bad KV."""
        if not (request.kv_transfer_params or {}).get("do_remote_decode"):
            return
        self._counters.count("prefills_spoilt")
        logger.warning(
            "pdrelay: %s is not handed over: another connector could not load blocks of its prompt",
            request.request_id,
        )
        if name := self._push_progress.name_of(request):
            self._abandon_push(request, name)

    def take_back(self, own: str) -> None:
        """End the lease of a request that ended in this step, and has bad KV."""
        if (lease := self._new_leases.get(own)) is not None:
            self._counters.count("prefills_spoilt")
            logger.warning("pdrelay: lease of %s is revoked: it has bad KV", own)
            self._post(lambda control, _: control.abandon((lease,)))

    def step_ended(self) -> None:
        """VLLM has handled all results of a step, and clients are about to get theirs."""
        self._new_leases.clear()

    def finished(
        self,
        request: Request,
        blocks: BlockTables,
        *,
        is_spoilt: bool = False,
        is_sure: bool = True,
    ) -> dict[str, Any] | None:
        """Lease a finished prefill's blocks; return its kv_transfer_params. None: no prefill.

        ``is_spoilt``: it was given up. ``is_sure``: it will not be taken back, so clients may get
        its token.
        """
        if is_spoilt:
            self._window_pins.release(request.request_id)
            return None
        try:
            offer = self._hand_over(request, self._window_pins.restore(request.request_id, blocks))
            if offer is not None and not is_sure:
                offer.pop(FIRST_TOKEN, None)
            return offer
        finally:
            self._window_pins.release(request.request_id)

    def lease_ended(self, request: RequestId, reason: LeaseEvent) -> None:
        """Free the blocks of a lease."""
        blocks = self._held_blocks.remove(request)
        self._transfers.ended(request)
        self._pool().free_blocks(reversed(blocks))
        self._push_progress.forget(request)
        level = logger.debug if reason in (LeaseEvent.DONE, LeaseEvent.DROPPED) else logger.warning
        level("pdrelay: lease of %s ended: %s (%d blocks)", request, reason.name, len(blocks))

    @property
    def has_pending(self) -> bool:
        """Whether the next step must reach the workers, even if the model computes nothing."""
        return bool(self._sampled) or self._push_progress.has_pending()

    @property
    def leases(self) -> int:
        """For how many prompts blocks are held."""
        return len(self._held_blocks)

    def release_preempted(self, live: Mapping[str, Request]) -> None:
        """Unpin sliding windows of prompts that are computed anew."""
        self._window_pins.release_preempted(live)

    @property
    def gauges(self) -> dict[str, float]:
        """Current leases and blocks."""
        return {
            "leases_held": float(len(self._held_blocks)),
            "blocks_held": float(self._held_blocks.blocks),
        }

    def relieve(self, short: ShortRequest | None, *, now: float) -> None:
        """Revoke unread leases if a request has lacked blocks for too long."""
        if not self._shortage.is_due(is_short=short is not None, now=now) or short is None:
            return
        if self.revoke(short.blocks, short.request.priority):
            logger.warning(
                "pdrelay: %s has lacked %d blocks for %g s: unread leases are revoked",
                short.request.request_id,
                short.blocks,
                self._settings.revoke_after,
            )

    def _hand_over(self, request: Request, blocks: BlockTables) -> dict[str, Any] | None:
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_decode"):
            return None
        if not self._engine_config.is_producer:
            self._name_role(request)
            return None
        if not can_move(request, self._engine_config.left_out_tokens):
            logger.warning(
                "pdrelay: %s is not handed over: it has computed its last token", request.request_id
            )
            return None
        is_pushed = self._is_pushed(params)
        name = RequestId(request.request_id)
        if is_pushed:
            transfer = self._push_progress.name_of(request)
            if transfer is None:
                return None  # begin() has logged the reason
            name = transfer
        has_ended = request.status in (
            RequestStatus.FINISHED_LENGTH_CAPPED,
            RequestStatus.FINISHED_STOPPED,
        )
        has_kv = has_ended and not has_changed_adapter(request)
        offer = self._lease(request, name, blocks, is_pushed=is_pushed) if has_kv else None
        if offer is None and is_pushed:
            self._abandon_push(request, name)
        return offer

    def _abandon_push(self, request: Request, name: RequestId) -> None:
        self._push_progress.abandon(request)
        self._post(lambda control, now: control.push_coordinator.abandoned(name, now=now))

    def _name_role(self, request: Request) -> None:
        """Log once why this engine does not lend: vLLM's NixlConnector would, in any role."""
        if self._has_named_role:
            return
        self._has_named_role = True
        logger.warning(
            "pdrelay: %s is not handed over: this engine's kv_role is kv_consumer; prefill engines "
            "need kv_producer or kv_both. This is said once",
            request.request_id,
        )

    def _is_pushed(self, params: Mapping[str, Any]) -> bool:
        """Whether the KV of a request is written into the decode engine's cache."""
        mode = self._settings.mode
        return mode is Mode.PUSH or (mode is Mode.AUTO and says_push(params))

    def _lease(
        self, request: Request, name: RequestId, blocks: BlockTables, *, is_pushed: bool
    ) -> dict[str, Any] | None:
        """Hold the prompt's blocks, and return the kv_transfer_params of a decode engine.

        The blocks are pinned in the pool. The alternative, to delay vLLM's release of the request,
        would keep the engine stepping as long as a lease lasts.
        """
        transfer = transfer_of(request.kv_transfer_params or {})
        if transfer is not None and self._transfers.take_abandoned(transfer):
            return None
        tokens = request.num_prompt_tokens
        prompt = [
            list(ids[group.blocks_of(tokens - 1 if group.state else 0, tokens)])
            for group, ids in zip(self._engine_config.groups, blocks, strict=True)
        ]
        pool = self._pool()
        pinned = [pool.blocks[block] for ids in prompt for block in ids if block != NULL]
        if not self.hold(name, pinned, request.priority):
            self._counters.count("leases_refused")
            return None
        self._new_leases[request.request_id] = name
        if transfer is not None:
            self._transfers.lend(transfer, name)
        is_sampled = not is_pushed and self._sample(name, prompt, tokens)
        self._post(
            lambda control, now: control.grant(name, now=now, sampled=is_sampled, pushed=is_pushed)
        )
        if is_pushed:
            self._push_progress.finish(request, prompt)
        engine = self._engine_config
        offer = self._signatures.sign(self._params(request, name, prompt, is_pushed=is_pushed))
        extras = engine.looks_back if is_pushed else {**engine.first_token, **engine.looks_back}
        return {**offer.to_params(), **extras, LEASE: self._settings.kv_lease_duration}

    def _sample(self, name: RequestId, prompt: list[list[int]], tokens: int) -> bool:
        """Order checksums of a prompt's blocks if it is sampled; return whether it is."""
        if not self._sampling.takes(name):
            return False
        groups = self._engine_config.groups
        self._sampled[name] = self._sampling.choose(
            name,
            [[BlockId(block) for block in ids] for ids in prompt],
            sizes={number: group.block_size for number, group in enumerate(groups)},
            states={number for number, group in enumerate(groups) if group.state},
            tokens=tokens,
        )
        self._counters.count("prefills_sampled")
        return True

    def hold(self, name: RequestId, blocks: list[KVCacheBlock], priority: int) -> bool:
        """Pin the blocks of a lease that is about to begin; false if there is a reason not to."""
        if not is_name(name):
            text = (
                "pdrelay: %.64r is not leased: ids must be printable text of at most %d characters"
            )
            logger.warning(text, name, MAX_ID)
            return False
        if name in self._held_blocks:  # a router has given this name to a push
            logger.warning("pdrelay: %s is not leased: there is a lease of this name already", name)
            return False
        if reason := self._exceeded_limit(blocks):
            logger.warning("pdrelay: %s is not leased: %s", name, reason)
            return False
        self._held_blocks.add(name, blocks, priority)
        self._pool().touch(blocks)
        return True

    def revoke(self, blocks: int, priority: int) -> bool:
        """Revoke unread leases, none more important than ``priority``, to free so many blocks.

        False: there are none.
        """
        candidates = self._held_blocks.candidates(blocks, priority)
        if candidates:
            self._post(lambda control, now: control.revoke(candidates, blocks, now=now))
        return bool(candidates)

    def _exceeded_limit(self, blocks: Sequence[KVCacheBlock]) -> str:
        """Return the limit that a lease of these blocks would exceed, in words; empty: none."""
        if len(self._held_blocks) >= self._settings.max_leases:
            return f"{len(self._held_blocks)} leases are held; max_leases is {self._settings.max_leases}"
        total = self._pool().num_gpu_blocks - 1  # without the null block
        would_be = self._held_blocks.blocks + self._held_blocks.new_blocks(blocks)
        share = self._settings.max_held_share
        # a single lease may exceed it: a prompt as long as the cache
        if len(self._held_blocks) and would_be > share * total:
            return f"leases would hold {would_be} of {total} blocks; max_held_share is {share:g}"
        return ""

    def _params(
        self, request: Request, name: RequestId, blocks: BlockTables, *, is_pushed: bool
    ) -> PullParams:
        return PullParams(
            remote_engine_id=self.engine,
            remote_request_id=RequestId(request.request_id),
            remote_host=self._engine_config.address.host,
            remote_port=self._engine_config.address.port,
            remote_block_ids=tuple(tuple(BlockId(block) for block in ids) for ids in blocks),
            remote_num_tokens=request.num_computed_tokens,
            tp_size=self._engine_config.ranks,
            dcp_size=self._engine_config.shards,
            pp_size=self._engine_config.stages,
            transfer_mode=(Mode.PUSH if is_pushed else Mode.PULL).value,
            pdrelay_prompt=digest(request, request.num_prompt_tokens),
            pdrelay_adapter=adapter_of(request),
            transfer_id=name if is_pushed else None,
            pdrelay_block_sizes=tuple(
                1 if group.state else group.block_size for group in self._engine_config.groups
            ),
            pdrelay_expires_at=ceil(self._wall_clock() + self._settings.kv_lease_duration),
        )


def _adding(name: RequestId, sums: Sequence[RankSums]) -> ControlCommand:
    return lambda control, now: control.lease_manager.add_sums(name, sums, now=now)

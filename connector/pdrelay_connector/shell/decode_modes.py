"""How the scheduler of a decode engine loads KV: by pull or by push.

Everything runs on the engine thread.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from vllm.v1.request import Request

from pdrelay_connector.core.ids import BlockId, RequestId
from pdrelay_connector.core.layout.cache_groups import moved_tokens
from pdrelay_connector.core.layout.transfer_plan import TokenRange
from pdrelay_connector.core.lease.kv_params import (
    PullParams,
    PushParams,
    parse_pull_params,
    parse_push_params,
)
from pdrelay_connector.core.lease.signatures import Signatures
from pdrelay_connector.core.messages import MAX_ID, LentBlocks
from pdrelay_connector.core.pull.load import LoadOrder
from pdrelay_connector.core.push.expected_push import PushOrder
from pdrelay_connector.core.results import LoadResult
from pdrelay_connector.errors import AdapterMismatch, InvalidKvParams, PromptMismatch
from pdrelay_connector.shell.control_thread import ControlCommand, Post
from pdrelay_connector.shell.engine_config import EngineConfig
from pdrelay_connector.shell.offloaded_blocks import OffloadedBlocks
from pdrelay_connector.shell.prompt_identity import adapter_of, digest
from pdrelay_connector.shell.timeline_notes import Clock

# the block ids of a request, for each KV cache group
BlockTables: TypeAlias = Sequence[Sequence[int]]


class PullDecode:
    """The workers read KV, and report ended loads with their step's output."""

    def __init__(self, engine_config: EngineConfig, signatures: Signatures, clock: Clock) -> None:
        self._engine_config = engine_config
        self._signatures = signatures
        self._clock = clock
        self._orders: list[LoadOrder] = []  # since the last step

    def read(self, request: Request, params: Mapping[str, Any]) -> PullParams:
        """Parse the params, and check that their blocks hold the KV of this prompt.

        Raises :exc:`~pdrelay_connector.errors.InvalidKvParams`.
        """
        source = parse_pull_params(params)
        is_proven = self._signatures.check(source, now=self._clock())
        if request.abort_immediately:
            # vLLM rejected the request: this stand-in only releases P's blocks, as
            # v1/engine/async_llm.py says
            return source
        _check(self._engine_config, request)
        _check_adapter(source, request)
        self._check_blocks(source, request.num_prompt_tokens)
        # Our prompt may be longer: by its last token, behind a state, and by the token that P has
        # made of it (shell/first_token.py). What P has not computed is computed here.
        self._check_prompt(source, digest(request, source.remote_num_tokens), is_proven=is_proven)
        return source

    def _check_prompt(self, source: PullParams, own: str | None, *, is_proven: bool) -> None:
        """Compare the digests of both prompts; signed params must have one, NixlConnector's none.

        A mismatch does not drop the lease: the blocks may belong to another request, which still
        needs them.
        """
        if source.pdrelay_prompt is None and own is not None and is_proven:
            raise PromptMismatch(
                f"the offered KV ({source.remote_request_id}) is of a prompt without token ids, "
                f"ours has some"
            )
        if source.pdrelay_prompt is not None and source.pdrelay_prompt != own:
            raise PromptMismatch(
                f"the offered KV ({source.remote_request_id}) belongs to another prompt"
            )

    def _check_blocks(self, source: PullParams, prompt: int) -> None:
        groups = self._engine_config.groups
        sizes = self.sizes(source)
        if len(source.remote_block_ids) != len(groups) or len(sizes) != len(groups):
            raise InvalidKvParams(
                f"{len(source.remote_block_ids)} KV cache groups are offered, this engine has "
                f"{len(groups)}"
            )
        tokens = self._engine_config.loaded_tokens(prompt)
        if source.remote_num_tokens < tokens:
            raise InvalidKvParams(
                f"{source.remote_num_tokens} tokens are offered, {tokens} are needed"
            )
        for number, group in enumerate(groups):
            start, stop = group.missing_tokens(tokens + 1, tokens)
            offered = self._offered(source, number, start, stop)
            if group.state:
                _check_state(offered, source.remote_num_tokens, stop)
            elif (
                0 in offered
                or len(offered) * sizes[number] < stop - start // sizes[number] * sizes[number]
            ):
                raise InvalidKvParams(
                    f"tokens {start} to {stop} are needed of KV cache group {number}, and not all "
                    f"are offered"
                )

    def _offered(self, source: PullParams, number: int, start: int, stop: int) -> Sequence[BlockId]:
        """Return P's blocks of these tokens. Of a state there is one, whatever P's block size."""
        blocks = source.remote_block_ids[number]
        size = self.sizes(source)[number]
        return (
            blocks
            if self._engine_config.groups[number].state
            else blocks[start // size : -(-stop // size)]
        )

    def sizes(self, source: PullParams) -> Sequence[int]:
        """Return P's block size for each group; by default ours."""
        return source.pdrelay_block_sizes or [
            group.block_size for group in self._engine_config.groups
        ]

    def start(
        self,
        request: Request,
        source: PullParams,
        tokens: int,
        external: int,
        local: BlockTables,
    ) -> Sequence[int]:
        """Order to read the last ``external`` of so many ``tokens``; return the blocks."""
        token_ranges: list[TokenRange] = []
        for number, group in enumerate(self._engine_config.groups):
            start, stop = group.missing_tokens(tokens + 1, external)
            if start < stop:
                if group.frees_early:  # a kernel's blocks may be smaller, and ours must be whole
                    unit = min(self.sizes(source)[number], group.block_size)
                    start = start // unit * unit
                remote = self._offered(source, number, start, stop)
                into = [BlockId(block) for block in local[number][group.blocks_of(start, stop)]]
                token_ranges.append(
                    TokenRange(number, start, stop, remote, into, whole=group.is_zeroed)
                )
        own = RequestId(request.request_id)
        self._orders.append(
            LoadOrder(
                own,
                source.remote_request_id,
                source.remote_engine_id,
                source.address,
                tuple(token_ranges),
            )
        )
        return [block for token_range in token_ranges for block in token_range.local]

    def take_orders(self) -> list[LoadOrder]:
        """Return the orders since the last call."""
        orders = self._orders
        self._orders = []
        return orders


class PushDecode:
    """The prefill engine writes KV.

    The control thread reports ended pushes, and the workers pass them on to vLLM.
    """

    def __init__(self, engine_config: EngineConfig, post: Post, offloaded: OffloadedBlocks) -> None:
        self._engine_config = engine_config
        self._post = post
        self._offloaded = offloaded
        self._deferred: dict[RequestId, PushOrder] = {}  # loads that have not begun
        self._newly_deferred: list[RequestId] = []  # since the last step

    def read(self, request: Request, params: Mapping[str, Any]) -> PushParams:
        """Parse the address of the prefill engine, which compares the prompts' digests.

        Raises :exc:`~pdrelay_connector.errors.InvalidKvParams`.
        """
        source = parse_push_params(params, request.request_id)
        if not request.abort_immediately:
            _check(self._engine_config, request)
        return source

    def start(
        self,
        request: Request,
        source: PushParams,
        tokens: int,
        external: int,
        local: BlockTables,
    ) -> Sequence[int]:
        """Register blocks at the prefill engine, which writes into them; return them."""
        groups: list[LentBlocks] = []
        for group, blocks in zip(self._engine_config.groups, local, strict=True):
            start, stop = group.missing_tokens(tokens + 1, external)
            into = blocks[group.blocks_of(start, stop)] if start < stop else ()
            groups.append(LentBlocks(start, stop, tuple(BlockId(block) for block in into)))
        own = RequestId(request.request_id)
        engine = source.remote_engine_id
        prompt = digest(
            request, moved_tokens(request.num_prompt_tokens, self._engine_config.left_out_tokens)
        )
        order = PushOrder(
            own, source.remote_request_id, engine, source.address, prompt, tuple(groups)
        )
        if self._offloaded.may_be_copied:
            self._deferred[own] = order
            self._newly_deferred.append(own)
        else:
            self._post(_expecting(order))
        return [block for lent in groups for block in lent.blocks]

    def register(self, requests: Iterable[RequestId]) -> None:
        """Begin loads, unless they have been aborted."""
        for own in requests:
            if (order := self._deferred.pop(own, None)) is not None:
                self._post(_expecting(order))

    @property
    def is_deferring(self) -> bool:
        """Whether a load can begin only after the next step."""
        return bool(self._deferred)

    def abort(self, own: RequestId) -> LoadResult | None:
        """Stop the prefill engine, or return the end of a load that has not begun.

        VLLM keeps the blocks until workers report it.
        """
        if (order := self._deferred.pop(own, None)) is None:
            self._post(lambda control, _: control.push_receiver.stop(own))
            return None
        self._post(lambda control, _: control.lease_renewer.release(own, order.engine))
        return LoadResult(own, "the request was aborted")

    def take_deferred(self) -> list[RequestId]:
        """Return the loads that may begin when the workers have begun the next step."""
        deferred = self._newly_deferred
        self._newly_deferred = []
        return deferred


def _expecting(order: PushOrder) -> ControlCommand:
    return lambda control, now: control.push_receiver.expect(order, now=now)


def _check_state(blocks: Sequence[BlockId], covered: int, computed: int) -> None:
    """Raise unless the state after exactly ``computed`` tokens is offered; for 0, none is needed.

    vLLM computes the next token from it, so a state that covers that token already would include it
    twice.
    """
    if computed and covered != computed:
        raise InvalidKvParams(
            f"a state after {covered} tokens is offered, one after {computed} is needed"
        )
    if computed and (len(blocks) != 1 or 0 in blocks):
        raise InvalidKvParams(f"{len(blocks)} blocks are offered of a state, which is in one")


def _check(engine_config: EngineConfig, request: Request) -> None:
    if len(request.request_id) > MAX_ID:
        raise InvalidKvParams(
            f"the request's own id has {len(request.request_id)} characters, {MAX_ID} are allowed"
        )
    if not engine_config.is_consumer:
        raise InvalidKvParams("this engine's kv_role is kv_producer, it cannot load KV")


def _check_adapter(source: PullParams, request: Request) -> None:
    """Raise if the KV was computed with another adapter; a prompt's digest would not name it.

    vLLM's NixlConnector names no adapter, and digests no prompt. An engine of ours that digests a
    prompt, but names no adapter, computed without one, or is older and only knows its name.
    """
    own = adapter_of(request)
    if own is not None and source.pdrelay_adapter is None and source.pdrelay_prompt is not None:
        raise AdapterMismatch(
            f"the offered KV ({source.remote_request_id}) names no adapter, the request here has "
            f"{own!r}; engine "
            f"{source.remote_engine_id} computed it without one, or is of an older version"
        )
    if source.pdrelay_adapter is not None and source.pdrelay_adapter != own:
        raise AdapterMismatch(
            f"the offered KV ({source.remote_request_id}) was computed with the adapter "
            f"{source.pdrelay_adapter!r}, "
            f"the request here has {own!r}; its name and its weights must be equal on both engines"
        )

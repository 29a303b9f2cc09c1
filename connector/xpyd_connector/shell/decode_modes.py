"""What a decode engine's scheduler does differently in pull and in push. Chosen once, when the connector is built."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from xpyd_connector.core.control import ControlPlane
from xpyd_connector.core.ids import BlockId, RequestId
from xpyd_connector.core.layout.transfer_plan import TokenRange
from xpyd_connector.core.lease.kv_params import (
    PullParams,
    PushParams,
    digest_prompt,
    parse_pull_params,
    parse_push_params,
)
from xpyd_connector.core.lease.signatures import Signatures
from xpyd_connector.core.messages import MAX_ID, LentBlocks
from xpyd_connector.core.pull.load import LoadOrder
from xpyd_connector.core.push.decode_scheduler import PushOrder
from xpyd_connector.core.results import LoadResult
from xpyd_connector.errors import InvalidKvParams, PromptMismatch
from xpyd_connector.shell.engine_config import EngineConfig
from xpyd_connector.shell.metadata import StepMetadata

ControlCommand: TypeAlias = Callable[[ControlPlane, float], None]
Post: TypeAlias = Callable[[ControlCommand], None]
Clock: TypeAlias = Callable[[], float]  # s since the epoch: the only clock that two engines share
BlockTables: TypeAlias = Sequence[Sequence[int]]  # a request's blocks, of each KV cache group


class DecodeMode(Protocol):
    """How KV comes here. All of it runs on the engine thread."""

    def read(self, request: Request, params: Mapping[str, Any]) -> PullParams | PushParams:
        """Read what the router carried here, or raise :exc:`~xpyd_connector.errors.InvalidKvParams`."""
        ...

    def start(
        self, request: Request, source: PullParams | PushParams, external: int, local: BlockTables
    ) -> Sequence[int]:
        """Have the last ``external`` tokens but one loaded; return the blocks they go to."""
        ...

    def abort(self, own: RequestId) -> None:
        """A request whose load is under way is finished already."""
        ...

    def ended(self, own: RequestId, source: PullParams | PushParams) -> None:
        """The workers have reported the end of a load."""
        ...

    def metadata(self, output: SchedulerOutput) -> StepMetadata:
        """Return what the workers must know in this step."""
        ...


class PullDecode:
    """The workers read; what they have read, and what not, they tell with their steps."""

    def __init__(self, engine_config: EngineConfig, post: Post, signatures: Signatures, clock: Clock) -> None:
        self._engine_config = engine_config
        self._post = post
        self._signatures = signatures
        self._clock = clock
        self._orders: list[LoadOrder] = []

    def read(self, request: Request, params: Mapping[str, Any]) -> PullParams:
        """Take an offer whose blocks are those of this very prompt."""
        offer = parse_pull_params(params)
        is_proven = self._signatures.check(offer, now=self._clock())
        if request.abort_immediately:
            return offer  # vLLM rejected the real request; this one, with a made-up prompt, gives the blocks back
        _check(self._engine_config, request)
        self._check_blocks(offer, request.num_prompt_tokens)
        self._check_prompt(offer, digest(request), is_proven=is_proven)
        return offer

    def _check_prompt(self, offer: PullParams, own: str | None, *, is_proven: bool) -> None:
        """Compare digests; vLLM's own connector sends none, which is not enough for an engine that wants proofs.

        When they differ, the lease is not dropped: the blocks may be another request's, which still needs them.
        """
        if offer.xpyd_prompt is None and own is not None and is_proven:
            raise PromptMismatch(
                f"the offered KV ({offer.remote_request_id}) is of a prompt without token ids, ours has some"
            )
        if offer.xpyd_prompt is not None and offer.xpyd_prompt != own:
            raise PromptMismatch(f"the offered KV ({offer.remote_request_id}) belongs to another prompt")

    def _check_blocks(self, offer: PullParams, prompt: int) -> None:
        groups, sizes = self._engine_config.groups, self._sizes(offer)
        if len(offer.remote_block_ids) != len(groups) or len(sizes) != len(groups):
            raise InvalidKvParams(
                f"{len(offer.remote_block_ids)} KV cache groups are offered, this engine has {len(groups)}"
            )
        if offer.remote_num_tokens < prompt - 1:
            raise InvalidKvParams(f"{offer.remote_num_tokens} tokens are offered, {prompt - 1} are needed")
        for number, group in enumerate(groups):
            start, stop = group.missing_tokens(prompt, prompt - 1)
            held = offer.remote_block_ids[number][start // sizes[number] : -(-stop // sizes[number])]
            if 0 in held or len(held) * sizes[number] < stop - start // sizes[number] * sizes[number]:
                raise InvalidKvParams(
                    f"tokens {start} to {stop} are needed of KV cache group {number}, and not all are offered"
                )

    def _sizes(self, offer: PullParams) -> Sequence[int]:
        """Return P's block sizes; one that does not say has ours."""
        return offer.xpyd_block_sizes or [group.block_size for group in self._engine_config.groups]

    def start(
        self, request: Request, source: PullParams | PushParams, external: int, local: BlockTables
    ) -> Sequence[int]:
        """Order a read."""
        if not isinstance(source, PullParams):
            raise TypeError(f"{type(source).__name__} is no offer")
        token_ranges: list[TokenRange] = []
        for number, (group, size) in enumerate(zip(self._engine_config.groups, self._sizes(source), strict=True)):
            start, stop = group.missing_tokens(request.num_prompt_tokens, external)
            if start < stop:
                remote = source.remote_block_ids[number][start // size : -(-stop // size)]
                into = [BlockId(block) for block in local[number][group.blocks_of(start, stop)]]
                token_ranges.append(TokenRange(number, start, stop, remote, into))
        own = RequestId(request.request_id)
        self._orders.append(
            LoadOrder(own, source.remote_request_id, source.remote_engine_id, source.address, tuple(token_ranges))
        )
        return [block for token_range in token_ranges for block in token_range.local]

    def abort(self, own: RequestId) -> None:
        """Nothing: the read ends by itself, and vLLM waits for that."""

    def ended(self, own: RequestId, source: PullParams | PushParams) -> None:
        """Stop renewing."""
        engine = source.remote_engine_id
        self._post(lambda control, _: control.lease_renewer.stop_renewing(own, engine))

    def metadata(self, output: SchedulerOutput) -> StepMetadata:
        """Hand the orders over."""
        orders, self._orders = self._orders, []
        return StepMetadata(orders, idle=output.total_num_scheduled_tokens == 0)


class PushDecode:
    """The prefill engine writes; the control thread tells when it has. The workers only pass that on to vLLM."""

    def __init__(self, engine_config: EngineConfig, post: Post) -> None:
        self._engine_config = engine_config
        self._post = post
        self.arrived: list[LoadResult] = []  # since the last step

    def read(self, request: Request, params: Mapping[str, Any]) -> PushParams:
        """Take the coordinates of the engine that will write. That the prompts are the same, that engine checks."""
        booking = parse_push_params(params, request.request_id)
        if not request.abort_immediately:
            _check(self._engine_config, request)
        return booking

    def start(
        self, request: Request, source: PullParams | PushParams, external: int, local: BlockTables
    ) -> Sequence[int]:
        """Lend blocks to the prefill engine."""
        groups: list[LentBlocks] = []
        for group, blocks in zip(self._engine_config.groups, local, strict=True):
            start, stop = group.missing_tokens(request.num_prompt_tokens, external)
            into = blocks[group.blocks_of(start, stop)] if start < stop else ()
            groups.append(LentBlocks(start, stop, tuple(BlockId(block) for block in into)))
        own, engine, prompt = RequestId(request.request_id), source.remote_engine_id, digest(request)
        ticket = PushOrder(own, source.remote_request_id, engine, source.address, prompt, tuple(groups))
        self._post(lambda control, now: control.push_receiver.expect(ticket, now=now))
        return [block for lent in groups for block in lent.blocks]

    def abort(self, own: RequestId) -> None:
        """Have the prefill engine stop; vLLM keeps the blocks until the load is reported as ended."""
        self._post(lambda control, _: control.push_receiver.stop(own))

    def ended(self, own: RequestId, source: PullParams | PushParams) -> None:
        """Nothing: the control thread knows."""

    def metadata(self, output: SchedulerOutput) -> StepMetadata:
        """Have the workers report what has arrived."""
        arrived, self.arrived = self.arrived, []
        return StepMetadata(arrived=arrived, idle=output.total_num_scheduled_tokens == 0)


def _check(engine_config: EngineConfig, request: Request) -> None:
    if len(request.request_id) > MAX_ID:
        raise InvalidKvParams(f"the request's own id has {len(request.request_id)} characters, {MAX_ID} are allowed")
    if not engine_config.is_consumer:
        raise InvalidKvParams("this engine's kv_role is kv_producer, it cannot take KV over")


def digest(request: Request) -> str | None:
    """Return a digest of everything that decides the KV of a request's prompt; None when it has no token ids."""
    features = [feature.identifier for feature in request.mm_features]
    if request.lora_request is not None:
        features.append(f"lora:{request.lora_request.lora_name}")
    prompt = request.prompt_token_ids
    tokens = prompt[: request.num_prompt_tokens] if prompt is not None else None
    return digest_prompt(tokens, features, request.cache_salt)

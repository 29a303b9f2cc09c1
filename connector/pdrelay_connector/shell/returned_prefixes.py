"""Prefills that first ask a decode engine for KV of earlier answers.

Everything here runs on the engine thread. The router names the engine in the params of a prefill
(``pdrelay_cached_on``).
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from vllm.logger import init_logger
from vllm.v1.request import Request

from pdrelay_connector.core.cached_prefix.prefill_scheduler import SearchEnded
from pdrelay_connector.core.counters import Counters
from pdrelay_connector.core.ids import EngineId, RequestId
from pdrelay_connector.core.lease.transfer_names import is_name
from pdrelay_connector.core.messages import MAX_FIND, MAX_ID, MAX_SALT, FindPrefix
from pdrelay_connector.shell.control_thread import Post
from pdrelay_connector.shell.decode_requests import DecodeRequests
from pdrelay_connector.shell.engine_config import EngineConfig
from pdrelay_connector.shell.prefix_hashes import pack_tokens

# engine id of a decode engine, in the kv_transfer_params of a prefill
CACHED_ON: Final = "pdrelay_cached_on"
# of the prompt, 0 to 1, that it has according to the router; a hint
CACHED_SHARE: Final = "pdrelay_cached_share"

logger = init_logger("vllm.pdrelay")


class _CachedOn(NamedTuple):
    """The router's part of a prefill's params."""

    engine: EngineId
    share: float


class ReturnedPrefixes:
    """Asks once for each prefill, after vLLM has looked it up in its own prefix cache."""

    def __init__(
        self, engine_config: EngineConfig, decodes: DecodeRequests, post: Post, counters: Counters
    ) -> None:
        self._is_on = bool(engine_config.prefix_hash) and engine_config.recomputes
        self._block_size = min((group.block_size for group in engine_config.groups), default=1)
        self._decodes = decodes
        self._post = post
        self._counters = counters
        self._engines: dict[RequestId, _CachedOn] = {}  # of requests that have not asked yet
        # requests that wait for an answer -> tokens cached here
        self._searching: dict[RequestId, int] = {}
        if engine_config.prefix_hash and not engine_config.recomputes:
            logger.warning(
                "pdrelay: this engine asks no other for cached KV: kv_load_failure_policy is not "
                "recompute"
            )

    def begin(self, request: Request, params: Mapping[str, Any]) -> None:
        """Note the engine to ask for a new prefill."""
        engine = params.get(CACHED_ON)
        if engine is None or not self._is_on:
            return
        if is_name(engine) and _is_plain(request):
            share = params.get(CACHED_SHARE, 1.0)
            is_share = isinstance(share, float | int) and 0 <= share <= 1
            named = _CachedOn(EngineId(engine), share if is_share else 1.0)
            self._engines[RequestId(request.request_id)] = named
        else:
            self._counters.count("prefixes_unsupported")

    def searches(self, request: Request, computed: int) -> bool:
        """Return whether a request waits for an answer; ``computed``: its tokens cached here."""
        own = RequestId(request.request_id)
        if own in self._searching:
            return True
        named = self._engines.pop(own, None)
        tokens = min(request.num_prompt_tokens - 1, MAX_FIND)
        if named is None or request.prompt_token_ids is None:
            return False
        if min(tokens, named.share * request.num_prompt_tokens) - computed < self._block_size:
            return False  # there is not a block to win
        self._searching[own] = computed
        question = FindPrefix(
            own, pack_tokens(request.prompt_token_ids[:tokens]), request.cache_salt
        )
        self._post(lambda control, now: control.prefix_finder.find(question, named.engine, now=now))
        return True

    def ended(self, ended: SearchEnded) -> None:
        """Load the blocks that were found, if the request still needs them."""
        computed = self._searching.pop(ended.request, None)
        params = ended.params
        if params is None:
            return
        if computed is None or params.remote_num_tokens <= computed:
            self._post(lambda control, _: control.prefix_finder.give_back(params))
            return
        self._counters.count("prefixes_found")
        self._decodes.begin_found(ended.request, params)

    def finished(self, request: Request) -> None:
        """A request has ended, perhaps before its answer came."""
        own = RequestId(request.request_id)
        self._engines.pop(own, None)
        if self._searching.pop(own, None) is not None:
            self._post(lambda control, _: control.prefix_finder.cancel(own))

    @property
    def is_searching(self) -> bool:
        """Whether a request waits for an answer."""
        return bool(self._searching)


def _is_plain(request: Request) -> bool:
    """Whether a request may be loaded, and only its tokens and its salt decide its KV."""
    return (
        request.prompt_token_ids is not None
        and request.prompt_embeds is None
        and not request.mm_features
        and request.lora_request is None
        and len(request.cache_salt or "") <= MAX_SALT
        and len(request.request_id) <= MAX_ID
        and not request.get_skip_reading_prefix_cache()
    )

"""Requests for the same prompt: of n answers, one loads it.

vLLM makes n requests of one (``vllm/v1/engine/parallel_sampling.py``), each with the same params.
P's lease ends with the first read, and the others find what it has loaded in the prefix cache.
"""

from typing import TypeAlias

from vllm.v1.request import Request

from pdrelay_connector.core.ids import EngineId, RequestId
from pdrelay_connector.core.lease.kv_params import PullParams, PushParams
from pdrelay_connector.shell.prompt_identity import digest

MAX_SHARED = 4096  # prompts whose later answers are known to need no load of their own

Prompt: TypeAlias = tuple[EngineId, RequestId]  # the prefill engine, and its name of the request


class SharedPrompts:
    """Everything runs on the engine thread."""

    def __init__(self) -> None:
        # who loads a prompt, or has loaded it (None); the oldest first
        self._loaders: dict[Prompt, Request | None] = {}
        self._prompts: dict[RequestId, Prompt] = {}  # of the requests that are here

    def joins(self, request: Request, source: PullParams | PushParams) -> bool:
        """Add a request; tell whether another one here loads its prompt, or has loaded it."""
        prompt = (source.remote_engine_id, source.remote_request_id)
        self._prompts[RequestId(request.request_id)] = prompt
        loader = self._loaders.get(prompt)
        # In push P alone compares prompts: one that came with params of another loads nothing for
        # the rightful one.
        if prompt in self._loaders and (loader is None or _is_same_prompt(request, loader)):
            return True
        if len(self._loaders) >= MAX_SHARED:
            self._loaders.pop(next(iter(self._loaders)))
        self._loaders[prompt] = request
        return False

    def loader_of(self, own: RequestId) -> Request | None:
        """Return who loads the prompt of a request, perhaps itself; None: nobody does any more."""
        prompt = self._prompts.get(own)
        return None if prompt is None else self._loaders.get(prompt)

    def loads_nothing(self, own: RequestId) -> None:
        """A request that was to load its prompt does not: the next one with that prompt may."""
        loader = self.loader_of(own)
        if loader is not None and loader.request_id == own:
            del self._loaders[self._prompts[own]]

    def finished(self, request: Request) -> None:
        """A request has ended."""
        prompt = self._prompts.pop(RequestId(request.request_id), None)
        if prompt is not None and self._loaders.get(prompt) is request:
            self._loaders[prompt] = None


def _is_same_prompt(first: Request, second: Request) -> bool:
    return digest(first, first.num_prompt_tokens) == digest(second, second.num_prompt_tokens)

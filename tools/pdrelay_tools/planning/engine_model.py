"""The model of an engine for ``pdrelay plan`` and ``pdrelay replay``: seconds of a step."""

from math import inf
from pathlib import Path
from typing import Annotated, Final

import msgspec

Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]
Share = Annotated[float, msgspec.Meta(ge=0, le=2)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e15)]
Count = Annotated[int, msgspec.Meta(ge=1, le=10**12)]
_MOST_BYTES: Final = 65_536  # of a file


class NoEngineModel(Exception):
    """A file describes no engine; the message says why, in one sentence."""


class EngineModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How fast an engine is, and how many requests and tokens it has room for.

    The defaults follow from the size of a model of 8e9 parameters in 16 bit and the data sheet of a
    GPU with 80 GB. They are no measurement: benchmarks/replay/fit.py measures an engine.
    """

    step_s: Seconds = 0.008  # of any step: reading the weights, starting the kernels
    prefill_token_s: Seconds = 5e-5  # of a prompt token that is computed
    prefill_context_s: Seconds = 1.3e-9  # of a prompt token, for each token before it: attention
    decode_request_s: Seconds = 5e-5  # of a request that gets a token
    # of a request that gets a token, for each token before it: reading KV
    decode_context_s: Seconds = 5e-8
    # of a request, outside of steps: HTTP, tokenizer, queues between processes
    leg_s: Seconds = 0.003
    # The API server works on one request at a time, and others wait for that.
    api_request_s: Seconds = 0.0  # of a request, before the engine has it: HTTP, JSON
    api_prompt_token_s: Seconds = 0.0  # of a request, for each token of its prompt: the tokenizer
    api_token_s: Seconds = 0.0  # of a token that is sent to a client: the detokenizer, JSON, HTTP
    prefill_request_s: Seconds = 0.0  # of a step, for each prompt of which it computes a part
    jitter: Share = 0.0  # of a step's time: the standard deviation of its logarithm
    max_num_batched_tokens: Count = 8192  # of a step
    max_num_seqs: Count = 256
    kv_tokens: Count = 400_000
    kv_bytes_per_token: Positive = 131_072.0
    link_bytes_per_s: Positive = 12.5e9  # of one engine's link
    link_s: Seconds = 0.002  # of a transfer, whatever its size

    def __post_init__(self) -> None:
        """Refuse what vLLM refuses (vllm/config/scheduler.py)."""
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs")

    def chunk_s(self, tokens: int, before: int) -> float:
        """Return the seconds that a step takes longer for this part of a prompt."""
        return self.prefill_request_s + tokens * (
            self.prefill_token_s + self.prefill_context_s * (before + tokens / 2)
        )

    def batch_s(self, requests: float, context: float) -> float:
        """Return the seconds that a step takes longer for requests that each get a token.

        ``context``: the tokens before it, of all requests together.
        """
        return requests * self.decode_request_s + context * self.decode_context_s

    def prompt_s(self, tokens: float, squared: float, cached: float) -> float:
        """Return the seconds of a mean prompt at full load, when every step is full.

        ``tokens`` and ``squared`` are the means of a prompt's length and of its square; ``cached``
        is the share that is not computed. A full step ends within a prompt, which makes one part
        more of it.
        """
        computed = tokens * (1 - cached)
        steps = computed / self.max_num_batched_tokens
        # A token has what is cached before it, and half of what is computed.
        context = squared * (1 - cached) * (cached + (1 - cached) / 2)
        parts = (1 + steps) * self.prefill_request_s
        engine = (
            steps * self.step_s
            + parts
            + computed * self.prefill_token_s
            + context * self.prefill_context_s
        )
        server = self.api_request_s + tokens * self.api_prompt_token_s + self.api_token_s
        return max(engine, server)

    def decode_rate(self, context: float, itl_s: float) -> float:
        """Return the tokens a second of the largest batch that keeps the ITL; 0: no batch does.

        ``context``: mean tokens before the next one of an answer.
        """
        token_s = self.batch_s(1, context)
        batch = float(self.max_num_seqs)
        if token_s:
            batch = min(batch, (itl_s - self.step_s) / token_s)
        if self.api_token_s:
            batch = min(batch, itl_s / self.api_token_s)
        if batch < 1:
            return 0.0
        seconds = max(self.step_s + batch * token_s, batch * self.api_token_s)
        return batch / seconds if seconds else inf


def read_engine_model(path: Path) -> EngineModel:
    """Read a JSON file; raises NoEngineModel."""
    try:
        return msgspec.json.decode(path.read_bytes()[:_MOST_BYTES], type=EngineModel)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise NoEngineModel(
            f"{path} does not describe an engine: {getattr(exc, 'strerror', None) or exc}"
        ) from exc

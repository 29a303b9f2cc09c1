"""What an engine's answer means when it is not the one we hoped for."""

from typing import Final

from xpyd_proxy.core.model import Answer, InstanceId
from xpyd_proxy.core.raw_json import NotJson, decode
from xpyd_proxy.core.said import ErrorBody
from xpyd_proxy.errors import EngineBusy, EngineError, EngineFault, Refused

BUSY: Final = frozenset({429, 503})  # statuses of an engine that lives and has no room


def check_prefill(prefill: InstanceId, answer: Answer) -> None:
    """Accept a good answer of the prefill leg.

    Raises:
        Refused: the engine says that the client is at fault.
        EngineError: the engine is at fault.
    """
    if answer.status == 200:
        return
    if 400 <= answer.status < 500:
        raise Refused(answer.status, answer.content_type, answer.body)
    raise _kind(answer)(f"{prefill} failed to prefill: it answered with status {answer.status}")


def refused_decode(decode: InstanceId, answer: Answer) -> Refused | EngineError:
    """Say what to raise for a decode leg that was not answered with 200."""
    if answer.status >= 400 and is_openai_error(answer.body):
        return Refused(answer.status, answer.content_type, answer.body)
    return _kind(answer)(f"{decode} failed to decode: it answered with status {answer.status}")


def _kind(answer: Answer) -> type[EngineError]:
    return EngineBusy if answer.status in BUSY else EngineFault


def is_openai_error(body: bytes) -> bool:
    """Tell an error that an OpenAI client understands from anything else."""
    try:
        decode(body, ErrorBody)
    except NotJson:
        return False
    return True

"""What an engine's answer means when it is not the one we hoped for."""

from typing import Final

from xpyd_proxy.core.model import EngineResponse, InstanceId
from xpyd_proxy.core.protocol.fault_table import BUSY
from xpyd_proxy.core.protocol.response_filter import check_type, clean_answer
from xpyd_proxy.core.raw_json import NotJson, decode
from xpyd_proxy.core.schemas import ErrorBody
from xpyd_proxy.errors import EngineBusy, EngineError, EngineFault, Refused

JSON: Final = "application/json"


def check_prefill(prefill: InstanceId, answer: EngineResponse) -> None:
    """Accept a good answer of the prefill leg.

    Raises:
        Refused: the engine says that the client is at fault.
        EngineError: the engine is at fault.
    """
    if answer.status == 200:
        return
    if 400 <= answer.status < 500:
        raise refusal(prefill, answer.status, answer.content_type, answer.body)
    raise _kind(answer)(f"{prefill} failed to prefill: it answered with status {answer.status}")


def refused_decode(decode: InstanceId, answer: EngineResponse) -> Refused | EngineError:
    """Say what to raise for a decode leg that was not answered with 200."""
    if 400 <= answer.status < 600 and is_openai_error(answer.body):
        return refusal(decode, answer.status, JSON, answer.body)
    return _kind(answer)(f"{decode} failed to decode: it answered with status {answer.status}")


def refusal(engine: InstanceId | str, status: int, content_type: str, body: bytes) -> Refused | EngineError:
    """Say what to raise for an engine's words that are to be the client's answer: EngineError if they cannot be."""
    said = content_type.encode("latin-1")
    try:
        check_type(engine, said)
        return Refused(status, content_type, clean_answer(engine, said, body))
    except EngineError as error:
        return EngineFault(f"{error} (status {status})")


def _kind(answer: EngineResponse) -> type[EngineError]:
    return EngineBusy if answer.status in BUSY else EngineFault


def is_openai_error(body: bytes) -> bool:
    """Tell an error that an OpenAI client understands from anything else."""
    try:
        decode(body, ErrorBody)
    except NotJson:
        return False
    return True

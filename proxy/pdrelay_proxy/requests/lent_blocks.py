"""Has a prefill engine free the blocks of an attempt that no decode engine will read; the client
never waits for it.
"""

from typing import Final

from pdrelay_proxy.core.model import Instance, LegRequest, PrefillResult
from pdrelay_proxy.core.protocol.request_bodies import RELEASE_PATH, abandon_body, release_body
from pdrelay_proxy.requests.attempt import Attempt

_ENGINES_MOST: Final = 16  # decode engines of which one is asked


def release_blocks(attempt: Attempt, prefill: Instance, handover: PrefillResult) -> None:
    """Free what a prefill engine has answered with.

    What is pushed needs none: the decode engine lends those blocks.
    """
    call = attempt.plan.call
    if call is None or handover.coordinates is not None:
        return
    body = release_body(call.fields, handover.params)
    decodes = attempt.readers(prefill)[:_ENGINES_MOST]
    attempt.life.services.releaser.release(
        prefill,
        [_leg(attempt, decode, body) for decode in decodes],
        _leg(attempt, prefill, abandon_body(call.fields, attempt.transfer)),
    )


def abandon_blocks(attempt: Attempt, prefill: Instance) -> None:
    """Free what a prefill engine may have leased by now that has failed, or was dropped."""
    call = attempt.plan.call
    if call is not None:
        attempt.life.services.releaser.abandon(
            prefill, _leg(attempt, prefill, abandon_body(call.fields, attempt.transfer))
        )


def _leg(attempt: Attempt, engine: Instance, body: bytes) -> LegRequest:
    headers = (*attempt.plan.headers_for(engine), (b"x-request-id", attempt.id.encode()))
    return LegRequest(engine, RELEASE_PATH, body, headers)

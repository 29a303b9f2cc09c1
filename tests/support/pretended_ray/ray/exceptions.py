"""What Ray raises where an actor's answer is asked for."""


class RayError(Exception):
    """All of them."""


class RayActorError(RayError):
    """The actor, or its node, has gone."""


class GetTimeoutError(RayError, TimeoutError):
    """The answer did not come in time."""

"""What is under way at engines for one request, as those see it who look after all requests."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from pdrelay_proxy.core.model import InstanceId
from pdrelay_proxy.requests.attempt import Attempt


class Answering(ABC):
    """The two legs of one prompt, or those of several.

    A class, because a compiled call of a Protocol is slow.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def engines(self) -> Sequence[InstanceId]:
        """List the engines of the legs that are under way."""

    @property
    @abstractmethod
    def attempts(self) -> Sequence[Attempt]:
        """List the tries that are under way."""

    @abstractmethod
    def pause(self) -> None:
        """Have the engines wait: the client is slow, which is not held against them."""

    @abstractmethod
    def resume(self) -> None:
        """Let the engines go on."""

    @abstractmethod
    def check_deadlines(self, now: float, /) -> None:
        """Fail each leg that has taken too long."""

"""Rules of push, each turned off: with ``pytest.MonkeyPatch``, where it is kept.

As in ``support.pull_mutants``; ``push/test_push_pair.py`` shows that each of these is noticed.
"""

from pdrelay_connector.core.push.decode_scheduler import PushReceiver
from pdrelay_connector.core.push.prefill_scheduler import PushCoordinator
from pdrelay_connector.core.results import LoadResult


def free_without_waiting_for_stopped(patch):
    give_up = PushReceiver._abort

    def hasty(self, *args):
        give_up(self, *args)
        self._results = [
            each._replace(quarantined=False) if isinstance(each, LoadResult) else each for each in self._results
        ]

    patch.setattr(PushReceiver, "_abort", hasty)


def ignore_one_rank(patch):
    register = PushCoordinator._register

    def forgetful(self, conn, order, now):
        register(self, conn, order, now)
        for push in self._by_request.get(order.request, {}).values():
            push.writing_ranks.discard(1)

    patch.setattr(PushCoordinator, "_register", forgetful)

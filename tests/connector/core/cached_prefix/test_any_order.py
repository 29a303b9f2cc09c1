"""Searches, reads and a changing cache, in any order: no wrong byte, and no block that stays pinned."""

import pytest
from hypothesis import settings

from pdrelay_connector.core.cached_prefix.decode_scheduler import PrefixLender
from support import returning
from support.mutation import NOTICED, each_mutant, search
from support.return_machine import ReturnMachine
from support.returning import CachingEngine
from support.searching import examples

ReturnMachine.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=40, deadline=None)
TestReturn = pytest.mark.slow(ReturnMachine.TestCase)  # any order of events: seconds


def answer_before_the_step_has_ended(patch):
    patch.setattr(CachingEngine, "must_wait", property(lambda self: False))


def forget_the_salt(patch):
    whole = returning.piecemeal
    without = lambda message: whole(type(message)(message.request, message.tokens, None))  # noqa: E731
    init = PrefixLender.__init__
    patch.setattr(PrefixLender, "__init__", lambda self, *args: init(self, *args[:-1], without))


def pin_nothing(patch):
    patch.setattr(CachingEngine, "evict", CachingEngine.evict_all_the_same)


@each_mutant(answer_before_the_step_has_ended, forget_the_salt, pin_nothing)
def test_a_broken_rule_is_noticed(monkeypatch, mutate):
    """Each mutant is one rule turned off; its name says which."""
    mutate(monkeypatch)

    with pytest.raises(NOTICED):
        search(ReturnMachine, 200)

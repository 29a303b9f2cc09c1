"""What stories with many faults share."""

import logging

import pytest


@pytest.fixture
def no_warnings():
    """A fault, a load that fails, a lease that is refused or revoked is one each, and there are thousands."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)

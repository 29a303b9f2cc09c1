"""The model to ask is read from a list that an engine made."""

import json

import pytest

from pdrelay_tools.proving.core.answer import Malformed
from pdrelay_tools.proving.core.cards import read_models

CARDS = [{"id": "lora", "parent": "base"}, {"id": "base", "max_model_len": 2048}, {"id": "other"}]


def listed(cards):
    return json.dumps({"object": "list", "data": cards}).encode()


def test_the_first_that_is_no_adapter_is_asked():
    found = read_models(listed(CARDS), None)

    assert (found.name, found.adapters, found.max_model_len) == ("base", ("lora",), 2048)


def test_a_model_can_be_named():
    assert read_models(listed(CARDS), "other").name == "other"


@pytest.mark.parametrize(
    ("body", "wanted"),
    [(b"", None), (b"{}", None), (listed([]), None), (listed(CARDS), "nobody"), (listed([{"id": 1}]), None)],
)
def test_no_model_is_an_error(body, wanted):
    with pytest.raises(Malformed):
        read_models(body, wanted)

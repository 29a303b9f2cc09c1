"""Tokens of prompts, by their bytes."""

import pytest

from pdrelay_proxy.core.model import RoutingHints
from pdrelay_proxy.features.expected_ttft.core.token_counts import TokenCounts

CHAT = RoutingHints("m", prompt=b'[{"role":"user","content":"' + b"x" * 400 + b'"}]')
IDS = RoutingHints("m", prompt=memoryview(b"[1234," + b"5678," * 100 + b"1]"))


def test_before_anything_is_counted_four_bytes_are_a_token():
    """About that of English."""
    assert TokenCounts().per_byte(CHAT) == 0.25


def test_what_engines_count_is_learned_for_each_model_and_for_token_ids_by_themselves():
    """A token id is five bytes of JSON, and another model has another tokenizer."""
    counts = TokenCounts()
    counts.counted(CHAT, len(CHAT.prompt) // 3)
    counts.counted(IDS, 102)

    assert counts.per_byte(CHAT) == pytest.approx(1 / 3, rel=0.01)
    assert counts.per_byte(IDS) == pytest.approx(102 / len(IDS.prompt))
    assert counts.per_byte(RoutingHints("other", prompt=CHAT.prompt)) == 0.25


def test_clients_cannot_fill_it_with_models():
    """Nor with counts that make no sense."""
    counts = TokenCounts()
    for number in range(1000):
        counts.counted(RoutingHints(f"m{number}", prompt=CHAT.prompt), 100)
    counts.counted(RoutingHints("m"), 100)
    counts.counted(CHAT, 0)

    assert len(counts._counted) <= 64
    assert counts.per_byte(RoutingHints("m999", prompt=CHAT.prompt)) == pytest.approx(100 / len(CHAT.prompt))

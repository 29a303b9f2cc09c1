"""How the token ids of a prompt are found in a prefill engine's answer."""

import json

import pytest

from pdrelay_proxy.core.protocol.prompt_ids import ids_in, read_with_ids
from pdrelay_proxy.core.raw_json import NULL
from pdrelay_proxy.core.schemas import PromptIdsAnswer


@pytest.mark.parametrize(
    "answer",
    [
        b'{"prompt_token_ids":[1,2,3],"choices":[{}],"kv_transfer_params":{"a":1}}',
        b'{"prompt_token_ids": [1,2,3],"choices":[{}],"kv_transfer_params":{"a":1}}',
        b'{"choices":[{"prompt_token_ids":[1,2,3]}],"kv_transfer_params":{"a":1}}',
        b'{"kv_transfer_params":{"a":1},"choices":[{"text":"\\"prompt_token_ids\\":[9","prompt_token_ids":[1,2,3]}]}',
        b'{"prompt_token_ids":null,"choices":[{"prompt_token_ids":[1,2,3]}],"kv_transfer_params":{"a":1}}',
    ],
)
def test_ids_are_read_without_a_look_at_each(answer):
    """They, and what is beside them."""
    read = read_with_ids(answer, PromptIdsAnswer)

    assert bytes(ids_in(read)) == b"[1,2,3]"
    assert bytes(read.kv_transfer_params) == b'{"a":1}'


@pytest.mark.parametrize(
    "answer",
    [
        {"kv_transfer_params": {"prompt_token_ids": [1, 2]}, "choices": [{}]},
        {"kv_transfer_params": {"prompt_token_ids": [1, 2]}, "choices": [{"prompt_token_ids": None}]},
        {"kv_transfer_params": {"prompt_token_ids": [1, 2]}, "prompt_token_ids": []},
        {"usage": {"prompt_token_ids": [1, 2]}},
        {"prompt_token_ids": []},
        {"prompt_token_ids": {"a": [1]}},
        {"choices": [{"prompt_token_ids": [1]}, {"prompt_token_ids": [1]}]},
    ],
    ids=repr,
)
def test_what_stands_elsewhere_under_their_name_is_not_the_ids(answer):
    """And it stays as it is."""
    read = read_with_ids(json.dumps(answer, separators=(",", ":")).encode(), PromptIdsAnswer)

    assert read is not None
    assert ids_in(read) is NULL
    assert json.loads(bytes(read.kv_transfer_params)) == answer.get("kv_transfer_params")


@pytest.mark.parametrize("answer", [b"", b"[]", b'{"prompt_token_ids":[1,2', b'{"prompt_token_ids":[[1],[2]]}'])
def test_odd_answers_are_read_whole_or_not_at_all(answer):
    """Lists of lists would be several prompts."""
    read = read_with_ids(answer, PromptIdsAnswer)

    assert read is None or ids_in(read) is NULL

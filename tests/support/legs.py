"""The two legs by hand, for tests that step between them."""

import httpx

TOKENS = 16
STALL_TOKENS = 77  # a prompt of exactly so many tokens keeps an engine of support.stalling in one step
STALL_SECONDS = "XPYD_TEST_STALL_SECONDS"  # for so long
OPEN = {"do_remote_decode": True, "do_remote_prefill": False}


def prompt_of(number, length=200):
    """Return token ids that share no block with another number's."""
    return [(number * 37 + 11 * i + i * i % (number + 3)) % 470 + 20 for i in range(length)]


def prefill(spec, prompt):
    """Have an engine compute a prompt and return the params for the decode leg."""
    return _post(spec, {"prompt": prompt, "max_tokens": 1, "min_tokens": 1, "kv_transfer_params": OPEN}).json()[
        "kv_transfer_params"
    ]


def decode(spec, prompt, params, *, tokens=TOKENS, timeout=120):
    """Ask an engine for the tokens; returns the response, whatever its status."""
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "kv_transfer_params": params}
    return _post(spec, body, timeout=timeout)


def plain(spec, prompt, *, tokens=TOKENS):
    """Ask an engine to do both by itself and return the text."""
    return text_of(_post(spec, {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True}))


def text_of(response):
    """Return the text of a completion that succeeded."""
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] != "error", response.text
    return choice["text"]


def _post(spec, body, timeout=120):
    body = {"model": "tiny", "temperature": 0, "seed": 0, **body}
    return httpx.post(f"{spec.base_url}/v1/completions", json=body, timeout=timeout, trust_env=False)

"""What the contracts with vLLM share."""

import warnings

import pytest


@pytest.fixture(scope="session", autouse=True)
def _vllm():
    """Import vLLM for all: it starts programs that look at this machine, and takes ten seconds of CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm.entrypoints.openai.chat_completion.protocol
        import vllm.usage.usage_lib  # noqa: F401

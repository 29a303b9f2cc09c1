"""Why engines with a connector return no routed experts: vLLM cannot tell those of a prompt that it has not computed.

When one of these tests fails vLLM can, and the router may put those of both legs together: the prefill engine's rows
are the prompt's, the decode engine's are those behind it (``routed_experts_prompt_start`` = the prompt's length).
"""

import inspect
import warnings

import numpy as np
import pytest

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine
BLOCK = 16


@pytest.fixture(scope="module")
def experts():
    """vLLM's module; importing vLLM warns about things that are not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("vllm.distributed.aux_output_connector.routed_experts")


def buffer_of(experts):
    return experts.RoutedExpertsBuffer(np.dtype(np.int16), (2, 4), BLOCK, 4, 64, 2)


def rows(count):
    return np.zeros((count, 2, 4), np.int16)


def test_an_engine_that_computes_a_prompt_keeps_all_its_rows(experts):
    """And those of its answer, whatever the length."""
    buffer = buffer_of(experts)

    assert len(buffer.capture("request", 0, rows(20))) == 1
    buffer.capture("request", 20, rows(1))
    assert len(buffer.read("request", 16, 21)) == 5


def test_an_engine_that_reads_a_prompt_stops_at_its_last_token(experts):
    """A decode engine computes the last token alone; unless that begins a block, the engine ends on an assertion."""
    assert buffer_of(experts).capture("aligned", BLOCK, rows(1)) == []
    for prompt in (BLOCK, BLOCK + 2, 2 * BLOCK - 1):
        with pytest.raises(AssertionError, match="not contiguous"):
            buffer_of(experts).capture("request", prompt - 1, rows(1))


def test_vllm_refuses_them_with_its_own_connectors(experts):
    """As ours does (shell/engine_config.py)."""
    from vllm.config import VllmConfig

    said = inspect.getsource(VllmConfig._verify_aux_output_compatibility)

    assert all(name in said for name in ("NixlConnector", "NixlPushConnector", "PD auxiliary output is not supported"))

"""What `pdrelay plan` computes of an engine is what `pdrelay replay` simulates."""

import pytest

from pdrelay_tools.planning.engine_model import EngineModel
from pdrelay_tools.planning.queueing import Spread
from pdrelay_tools.planning.replay.engine import EventLoop, VirtualEngine, VirtualLeg
from pdrelay_tools.planning.sizing import Aims, NoPlan, Traffic, rates_of

BLOCK = 16
MODELS = {
    "as it comes": EngineModel(),
    "parts cost": EngineModel(prefill_request_s=0.002, max_num_batched_tokens=2048),
    "attention": EngineModel(prefill_context_s=5e-8),
    "slow server": EngineModel(api_request_s=0.05, api_prompt_token_s=5e-5, api_token_s=2e-4),
}
in_each_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


def legs_of(count, prompt, output):
    """Return legs that share no block."""
    blocks = prompt // BLOCK
    return [VirtualLeg(range(n * blocks, (n + 1) * blocks), prompt, output) for n in range(count)]


@in_each_model
def test_a_prefill_engine_with_a_queue_has_the_planned_rate(model):
    """Many prompts of 3,200 tokens at once."""
    loop = EventLoop()
    engine = VirtualEngine(model, BLOCK, loop)
    for leg in legs_of(200, 3200, 1):
        engine.send(leg)
    loop.run()

    planned = rates_of(model, model, Traffic(1.0, Spread(3200, 0.0, 3200), Spread(1, 0.0, 1)), Aims(itl_s=1.0))
    assert engine.log.computed_tokens / loop.now == pytest.approx(planned.prefill_tokens_per_s, rel=0.02)


@in_each_model
def test_a_decode_engine_with_the_planned_batch_keeps_the_time_between_tokens(model):
    """Answers of 200 tokens to prompts of 1,600, as many as the rate and the target mean."""
    itl_s = 0.02
    planned = rates_of(model, model, Traffic(1.0, Spread(1600, 0.0, 1600), Spread(200, 0.0, 200)), Aims(itl_s=itl_s))
    batch = int(planned.decode_tokens_per_s * itl_s)
    loop = EventLoop()
    engine = VirtualEngine(model, BLOCK, loop)
    for leg in legs_of(batch, 1600, 200):
        engine.add(leg)
    loop.run()

    full = [gap for gap, tokens in engine.log.gaps if tokens == batch]
    assert sum(full) / len(full) == pytest.approx(itl_s, rel=0.03)


def test_a_cached_prompt_costs_less_but_its_attention():
    """By hand: 600 of 1,000 tokens are computed, behind 400."""
    model = EngineModel(step_s=0, prefill_token_s=1e-3, prefill_context_s=1e-6)

    assert model.prompt_s(1000, 1000**2, 0.4) == pytest.approx(model.chunk_s(600, 400))


def test_no_batch_keeps_a_time_between_tokens_that_is_shorter_than_a_step():
    """It is refused before anything is computed with it."""
    model = EngineModel(step_s=0.05)

    with pytest.raises(NoPlan, match=r"does not keep an ITL of 0.02 s, not even for one request"):
        rates_of(model, model, Traffic(1.0, Spread(100, 0.0, 100), Spread(10, 0.0, 10)), Aims(itl_s=0.02))

"""What a prefill engine says of the token that it makes: shown where it should not be, it is a wrong text."""

import dataclasses
import warnings
from types import SimpleNamespace

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's and vLLM's own, at their import
    from vllm.config import ModelConfig, StructuredOutputsConfig

    from pdrelay_connector.shell.first_token import first_token, looks_back

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine


def model_with(defaults, *, kind="llama", processors=None, rswa_window=None):
    """Return what vLLM knows of a model whose generation config has these defaults."""
    model = SimpleNamespace(
        max_model_len=2048,
        hf_config=SimpleNamespace(model_type=kind),
        logits_processors=processors,
        rswa_window=rswa_window,
        generation_config="vllm",
        override_generation_config=defaults,
    )
    model.get_diff_sampling_param = lambda: ModelConfig.get_diff_sampling_param(model)
    return model


def said(*, left_out=0, reasoning="", kind="llama", processors=None, rswa_window=None, **defaults):
    """What an engine says whose generation config has these defaults."""
    model = model_with(defaults, kind=kind, processors=processors, rswa_window=rswa_window)
    parsers = StructuredOutputsConfig(reasoning_parser=reasoning)
    config = SimpleNamespace(model_config=model, structured_outputs_config=parsers)
    return first_token(config, left_out)


def test_the_token_of_a_plain_model_may_be_shown():
    """With the length that its continuation must fit into."""
    says = {"pdrelay_first_token": {"apis": ["completions", "chat"], "max_model_len": 2048}}
    assert said() == says
    assert said(temperature=0.7, top_p=0.9, repetition_penalty=1.1) == says  # these look at all tokens alike


@pytest.mark.parametrize("parser", [{"reasoning": "qwen3"}, {"kind": "gpt_oss"}])
def test_the_token_of_a_chat_that_may_reason_is_not_shown(parser):
    """That of a completion is: nobody parses it."""
    assert said(**parser)["pdrelay_first_token"]["apis"] == ["completions"]


@pytest.mark.parametrize(
    "engine",
    [
        {"left_out": 1},
        {"rswa_window": 64},
        {"max_new_tokens": 50},
        {"processors": ["my.Processor"]},
    ],
    ids=repr,
)
def test_what_would_begin_anew_behind_the_token_is_not_continued(engine):
    """The answer would not be that of one engine."""
    assert said(**engine) == {}


@pytest.mark.parametrize(
    ("defaults", "processors", "says"),
    [
        ({}, None, {}),
        ({"temperature": 0.7, "repetition_penalty": 1.1}, None, {}),  # the penalty counts the prompt's tokens, too
        ({"max_new_tokens": 50}, None, {"pdrelay_looks_back": True}),
        ({}, ["my.Processor"], {"pdrelay_looks_back": True}),
    ],
)
def test_an_engine_says_that_its_own_defaults_look_back(defaults, processors, says):
    """Routers neither resume nor move its streams."""
    model = model_with(defaults, processors=processors)

    assert looks_back(SimpleNamespace(model_config=model)) == says


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_a_penalty_for_all_that_vllm_heeds_would_begin_anew(penalty):
    """VLLM before 0.32 takes none from the generation config: what it ignores hinders nothing."""
    heeded = model_with({penalty: 0.5}).get_diff_sampling_param()

    assert (said(**{penalty: 0.5}) == {}) == (penalty in heeded)


def test_vllm_has_what_is_read():
    """A name that it drops would let a token be shown that is none of the answer."""
    assert {"logits_processors", "generation_config", "override_generation_config", "max_model_len"} <= {
        each.name for each in dataclasses.fields(ModelConfig)
    }

"""A model's configuration is that of its files and flags, and not what became of it while the model was loaded."""

import json
import shutil
import socket
import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from vllm.config import LoadConfig, ModelConfig

    from pdrelay_connector.shell.model_config import digest_model_config

from pdrelay_tools.local.model import ensure_model

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine


@pytest.fixture
def folder(tmp_path):
    ensure_model(tmp_path / "m")
    return tmp_path / "m"


def config(folder, **choices):
    return ModelConfig(model=str(folder), max_model_len=128, **choices)


def digest_of(model):
    return digest_model_config(model, LoadConfig())


def change(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_what_a_model_changes_while_it_is_loaded_does_not_matter(folder):
    """P of two ranks loads it in other processes than its scheduler's, D of one rank in its own."""
    model = config(folder)
    before = digest_of(model)
    model.hf_config.attn_temperature_tuning = True
    model.hf_config.rms_norm_eps = 1.0
    model.hf_config.rope_parameters = {"rope_type": "default", "rope_theta": 1.0}

    assert digest_of(model) == before == digest_of(config(folder))


@pytest.mark.parametrize(
    "overrides",
    [
        {"rms_norm_eps": 1e-3},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        lambda config: config.update({"rms_norm_eps": 1e-3}) or config,
    ],
    ids=["value", "object", "function"],
)
def test_overrides_are_part_of_it(folder, overrides):
    """The same flag on both engines, or the same value in the file of one of them."""
    overridden = config(folder, hf_overrides=overrides)

    assert digest_of(overridden) != digest_of(config(folder))
    assert digest_of(overridden) == digest_of(config(folder, hf_overrides=overrides))


def test_an_override_is_what_the_file_might_say(folder):
    """One engine's operator has changed the file, the other's gives a flag."""
    overridden = digest_of(config(folder, hf_overrides={"rms_norm_eps": 1e-3}))
    change(folder, rms_norm_eps=1e-3)

    assert digest_of(config(folder)) == overridden


def test_the_configuration_may_lie_elsewhere(folder, tmp_path):
    """``--hf-config-path``: the file beside the weights is not read."""
    ensure_model(tmp_path / "other")
    change(tmp_path / "other", rms_norm_eps=1e-3)
    elsewhere = digest_of(config(folder, hf_config_path=str(tmp_path / "other")))

    assert elsewhere == digest_of(config(tmp_path / "other")) != digest_of(config(folder))


def test_a_model_of_the_hub_is_read_from_its_cache_alone(folder, tmp_path, monkeypatch):
    """An engine without the hub starts as fast as another one."""
    commit = "a" * 40
    cached = tmp_path / "cache/models--org--m"
    shutil.copytree(folder, cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text(commit)
    model = config(folder)
    before = digest_of(model)
    model.model = "org/m"
    model.hf_config.rms_norm_eps = 1.0
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("a name was looked up"))

    assert digest_model_config(model, LoadConfig(download_dir=str(tmp_path / "cache"))) == before


def test_code_in_another_repository_is_not_asked_for(folder, caplog):
    """Transformers would ask the hub for it, each time."""
    model = config(folder)
    model.trust_remote_code = True
    change(folder, auto_map={"AutoConfig": "org/code--configuration.Config"})
    with caplog.at_level("WARNING"):
        digest_of(model)

    assert "its code lies in another repository" in caplog.text


def test_files_that_are_gone_are_said_and_the_live_one_is_taken(folder, caplog):
    """It is known, and that of an engine whose model changes nothing is the same."""
    model = config(folder)
    before = digest_of(model)
    (folder / "config.json").unlink()
    with caplog.at_level("WARNING"):
        assert digest_of(model) == before

    assert "as it is after the model was loaded" in caplog.text


def test_code_of_a_model_that_fails_is_said_and_the_live_one_is_taken(folder, caplog):
    """It is anybody's, and runs again: any exception may come out of it."""
    model = config(folder)
    before = digest_of(model)
    model.hf_overrides = lambda config: config if config.model_type.startswith("dummy") else 1 / 0
    with caplog.at_level("WARNING"):
        assert digest_of(model) == before

    assert "division by zero" in caplog.text


@pytest.mark.parametrize(("changes", "is_seen"), [({"max_model_len": 40000}, True), ({"max_model_len": 1000}, False)])
def test_what_llama_4_takes_from_flags_is_part_of_it(folder, changes, is_seen):
    """``attn_temperature_tuning`` is on from 32 K tokens on, and alters the KV of long prompts."""
    change(folder, max_position_embeddings=100000)
    short = config(folder)
    other = config(folder)
    for model in (short, other):
        model.hf_config.architectures = ["Llama4ForCausalLM"]
    other.max_model_len = changes["max_model_len"]

    assert (digest_of(other) != digest_of(short)) is is_seen

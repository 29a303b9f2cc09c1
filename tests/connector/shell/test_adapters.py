"""LoRA adapters: the same name is not the same adapter."""

import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from vllm.lora.request import LoRARequest

    from xpyd_connector.shell.adapters import AdapterIdentities

from support.adapters import write_adapter

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine


def request(folder, name="sql", number=1, **options):
    return LoRARequest(lora_name=name, lora_int_id=number, lora_path=str(folder), **options)


def fresh(folder, name="sql"):
    """What an engine says that has just loaded it."""
    return AdapterIdentities().of(request(folder, name))


def test_an_adapter_is_its_name_and_its_weights_wherever_it_lies(tmp_path):
    """P and D may have it at two paths, and two adapters at one."""
    one, copy, other = (write_adapter(tmp_path / name, seed=seed) for name, seed in [("a", 1), ("b", 1), ("c", 2)])

    assert fresh(one) == fresh(copy)
    assert fresh(one) != fresh(other)
    assert fresh(one) != fresh(one, "chat")


def test_its_settings_are_part_of_it(tmp_path):
    """With another alpha the same weights make other KV."""
    one, other = write_adapter(tmp_path / "a"), write_adapter(tmp_path / "b")
    config = other / "adapter_config.json"
    before = fresh(other)
    config.write_text(config.read_text().replace("{", '{"base_model_name_or_path": "/mnt/m", ', 1))
    assert fresh(one) == fresh(other) == before
    config.write_text(config.read_text().replace('"lora_alpha": 16', '"lora_alpha": 8'))

    assert fresh(one) != fresh(other)


def test_an_adapter_that_changed_behind_the_engine_shares_kv_with_nobody(tmp_path):
    """The engine has the old weights, or the new ones if it had no room for the adapter meanwhile."""
    folder, adapters = write_adapter(tmp_path / "a", seed=1), AdapterIdentities()
    old = adapters.of(request(folder))
    replace_weights(folder, write_adapter(tmp_path / "b", seed=2))
    changed, elsewhere = adapters.of(request(folder)), fresh(folder)

    assert len({old, changed, elsewhere}) == 3
    assert changed == adapters.of(request(folder))


@pytest.mark.parametrize("options", [{"number": 2}, {"load_inplace": True}], ids=["loaded again", "loaded in place"])
def test_an_adapter_that_is_loaded_anew_is_read_anew(tmp_path, options):
    """At runtime, by ``/v1/load_lora_adapter``."""
    folder, adapters = write_adapter(tmp_path / "a", seed=1), AdapterIdentities()
    old = adapters.of(request(folder))
    replace_weights(folder, write_adapter(tmp_path / "b", seed=2))

    assert old != adapters.of(request(folder, **options)) == fresh(folder)


def test_files_that_cannot_be_read_are_known_by_their_place(tmp_path):
    """Of two engines with one such path nothing else is known; those with other paths compute their prompts."""
    (tmp_path / "a").mkdir()

    assert fresh(tmp_path / "a") == fresh(tmp_path / "a") != fresh(tmp_path / "b")


def replace_weights(folder, other):
    (other / "adapter_model.safetensors").rename(folder / "adapter_model.safetensors")

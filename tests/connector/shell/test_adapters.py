"""LoRA adapters: the same name is not the same adapter."""

import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from vllm.lora.request import LoRARequest

    from pdrelay_connector.shell.adapters import AdapterIdentities

from support.adapters import write_adapter

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine


def request(folder, name="sql", number=1, **options):
    return LoRARequest(lora_name=name, lora_int_id=number, lora_path=str(folder), **options)


def fresh(folder, name="sql"):
    """What an engine says that has just loaded it."""
    return AdapterIdentities().identity_of(request(folder, name))


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
    folder = write_adapter(tmp_path / "a", seed=1)
    adapters = AdapterIdentities()
    old = adapters.identity_of(request(folder))
    replace_weights(folder, write_adapter(tmp_path / "b", seed=2))
    changed = adapters.identity_of(request(folder))
    elsewhere = fresh(folder)

    assert len({old, changed, elsewhere}) == 3
    assert changed == adapters.identity_of(request(folder))


@pytest.mark.parametrize("options", [{"number": 2}, {"load_inplace": True}], ids=["loaded again", "loaded in place"])
def test_a_second_identity_of_one_name_and_path_is_shared_with_nobody(tmp_path, options, caplog):
    """VLLM finds blocks by name and path: those of the old weights would be handed over as those of the new ones."""
    folder = write_adapter(tmp_path / "a", seed=1)
    adapters = AdapterIdentities()
    old = adapters.identity_of(request(folder))
    assert not adapters.has_changed(request(folder))
    replace_weights(folder, write_adapter(tmp_path / "b", seed=2))
    with caplog.at_level("WARNING"):
        mixed = {adapters.identity_of(request(folder, **options)) for _ in range(3)}

    assert adapters.has_changed(request(folder, **options))
    assert len(mixed) == 1
    assert mixed.isdisjoint({old, fresh(folder)})
    assert caplog.text.count("load changed weights from another path") == 1


def test_weights_that_are_put_back_do_not_mend_it(tmp_path):
    """Blocks of both are in the cache."""
    folder = write_adapter(tmp_path / "a", seed=1)
    adapters = AdapterIdentities()
    old = adapters.identity_of(request(folder))
    replace_weights(folder, write_adapter(tmp_path / "b", seed=2))
    mixed = adapters.identity_of(request(folder, load_inplace=True))
    replace_weights(folder, write_adapter(tmp_path / "c", seed=1))

    assert adapters.identity_of(request(folder)) == mixed != old == fresh(folder)


@pytest.mark.parametrize("options", [{}, {"number": 2}, {"load_inplace": True}], ids=str)
def test_the_same_files_written_again_are_the_same_adapter(tmp_path, options):
    """A volume that is mounted anew, or a copy that is made again."""
    folder = write_adapter(tmp_path / "a", seed=1)
    adapters = AdapterIdentities()
    old = adapters.identity_of(request(folder))
    replace_weights(folder, write_adapter(tmp_path / "b", seed=1))

    assert adapters.identity_of(request(folder, **options)) == old == fresh(folder)
    assert not adapters.has_changed(request(folder))


def test_another_path_is_another_adapter(tmp_path):
    """What the warning advises: vLLM's blocks of the two have other names."""
    adapters = AdapterIdentities()
    one, other = (write_adapter(tmp_path / name, seed=seed) for name, seed in [("a", 1), ("b", 2)])
    adapters.identity_of(request(one))

    assert adapters.identity_of(request(other, load_inplace=True)) == fresh(other)
    assert adapters.identity_of(request(one)) == fresh(one)


def test_files_that_vanish_change_an_adapter(tmp_path):
    """The engine has them in memory still, or not any more."""
    folder = write_adapter(tmp_path / "a", seed=1)
    adapters = AdapterIdentities()
    adapters.identity_of(request(folder))
    folder.rename(tmp_path / "b")

    assert adapters.has_changed(request(folder))


def test_files_that_cannot_be_read_are_known_by_their_place(tmp_path):
    """Of two engines with one such path nothing else is known; those with other paths compute their prompts."""
    (tmp_path / "a").mkdir()

    assert fresh(tmp_path / "a") == fresh(tmp_path / "a") != fresh(tmp_path / "b")


def test_a_path_that_the_system_refuses_to_look_at_is_known_by_its_place(tmp_path):
    """A stale mount, or a folder that is closed to us, must not end the engine for a request of its adapter."""
    folder = tmp_path  # its own name is as long as a path may be, and those of its files are longer
    while (rest := 4090 - len(str(folder))) > 1:
        folder /= "x" * min(rest - 1, 200)
    folder.mkdir(parents=True)
    nameless = AdapterIdentities().identity_of(request("x" * 300))

    assert "not read" in fresh(folder)
    assert "not read" in nameless
    assert "not read" in AdapterIdentities().identity_of(request("~no-such-user/adapter"))


def replace_weights(folder, other):
    (other / "adapter_model.safetensors").rename(folder / "adapter_model.safetensors")

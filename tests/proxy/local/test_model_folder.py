"""Which folder engines load their model from."""

import pytest

from pdrelay_proxy.local.errors import LocalError
from pdrelay_proxy.local.model import FINGERPRINT
from pdrelay_proxy.local.model_folder import TINY, prepare_model


def test_a_model_of_ones_own_is_served_as_it_is(tmp_path):
    """`--model DIR` may name a real one."""
    (tmp_path / "config.json").write_text("{}")

    assert prepare_model(tmp_path) == f"{tmp_path}, as it is"
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_the_tiny_model_is_made_where_it_is_missing(tmp_path, monkeypatch):
    """Nothing can be fetched from a hub."""
    monkeypatch.chdir(tmp_path)

    assert prepare_model(TINY).endswith("made: random weights, 5 MB")
    assert prepare_model(TINY).endswith("made earlier: random weights, 5 MB")
    assert (tmp_path / TINY / FINGERPRINT).exists()


def test_no_other_folder_gets_a_model(tmp_path):
    """Its random words would pass for those of the model that the folder is named after."""
    with pytest.raises(LocalError, match="there is no model in"):
        prepare_model(tmp_path / "Qwen3-0.6B")

    assert list(tmp_path.iterdir()) == []

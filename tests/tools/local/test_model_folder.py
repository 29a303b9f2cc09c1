"""Which folder engines load their model from."""

from pathlib import Path

import pytest

from pdrelay_tools.local.errors import LocalError
from pdrelay_tools.local.made_folder import FINGERPRINT, write_json
from pdrelay_tools.local.model_folder import named_folder, prepare_model, prepare_smollm2
from pdrelay_tools.local.packaged_model import SMOLLM2
from pdrelay_tools.local.plan import SMOLLM2_FOLDER, TINY_FOLDER


def test_a_model_of_ones_own_is_served_as_it_is(tmp_path):
    """`--model DIR` may name a real one."""
    (tmp_path / "config.json").write_text("{}")

    assert prepare_model(tmp_path) == f"{tmp_path}, as it is"
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_the_tiny_model_is_made_where_it_is_missing(tmp_path, monkeypatch):
    """Nothing can be fetched from a hub."""
    monkeypatch.chdir(tmp_path)

    assert prepare_model(TINY_FOLDER).endswith("made: random weights, 5 MB")
    assert prepare_model(TINY_FOLDER).endswith("made earlier: random weights, 5 MB")
    assert (tmp_path / TINY_FOLDER / FINGERPRINT).exists()


def test_no_other_folder_gets_a_model(tmp_path):
    """Its random words would pass for those of the model that the folder is named after."""
    with pytest.raises(LocalError, match="there is no model in"):
        prepare_model(tmp_path / "Qwen3-0.6B")

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "folder"),
    [(None, SMOLLM2_FOLDER), ("tiny", TINY_FOLDER), ("./tiny", Path("tiny")), ("/m/x", Path("/m/x"))],
)
def test_a_model_is_asked_for_by_its_name_or_its_folder(name, folder):
    """Without a word it is the one that answers in English."""
    assert named_folder(name) == folder


def test_the_english_model_is_used_where_it_is(tmp_path, monkeypatch):
    """Without asking an index again."""
    monkeypatch.chdir(tmp_path)
    SMOLLM2_FOLDER.mkdir(parents=True)
    write_json(SMOLLM2_FOLDER / FINGERPRINT, SMOLLM2.fingerprint)
    said = []

    assert prepare_smollm2(said.append, lambda *_: None) == SMOLLM2_FOLDER
    assert said == [f"{SMOLLM2_FOLDER}, fetched earlier: 135 million weights, English, Apache-2.0"]


def test_where_it_cannot_be_had_the_random_one_answers(tmp_path, monkeypatch):
    """One sentence says why, and how not to try."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".pdrelay").mkdir()
    (tmp_path / ".pdrelay/models").mkdir()
    (tmp_path / f".pdrelay/models/.{SMOLLM2_FOLDER.name}.lock").mkdir()  # so that it ends before pip is asked
    said = []

    assert prepare_smollm2(said.append, lambda *_: None) == TINY_FOLDER
    assert said == [
        "no SmolLM2-135M-Instruct, so a tiny random model answers (--model tiny does not try): "
        ".pdrelay/models/.SmolLM2-135M-Instruct.lock: Is a directory",
        ".pdrelay/models/tiny, made: random weights, 5 MB",
    ]

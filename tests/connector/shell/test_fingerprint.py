"""What must be equal, as peers compare it in a sentence and routers by a hash."""

import warnings
from types import SimpleNamespace

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from pdrelay_connector.shell.fingerprint import _from_config, fingerprint, info_labels, with_model
    from pdrelay_connector.shell.vllm_versions import VLLM_VERSION

from pdrelay_connector.core.layout.cache_groups import CacheGroup
from pdrelay_connector.core.messages import PROTOCOL
from pdrelay_connector.core.session.peers import mismatch
from pdrelay_connector.settings import Mode, Settings
from pdrelay_tools.local.model import TinyModel, ensure_model

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine


class Revision(str):
    """What vLLM keeps: the name that was asked for, and the commit it stands for (huggingface_hub)."""

    resolved = ""


def at(commit, name="main"):
    revision = Revision(name)
    revision.resolved = commit
    return revision


def hf_config(commit=None, **values):
    return SimpleNamespace(_commit_hash=commit, to_dict=lambda: {"rope_theta": 1e4, **values})


def model(name="org/m", **changes):
    """A model whose files are on no machine, where a test names no folder."""
    fields = {
        "model": str(name), "tokenizer": str(name), "tokenizer_revision": None, "tokenizer_mode": "auto",
        "served_model_name": "m", "revision": None, "code_revision": None, "quantization": None, "dtype": "bfloat16",
        "hf_config": hf_config(), "hf_config_path": None, "hf_overrides": {}, "trust_remote_code": False,
        "config_format": "auto", "get_total_num_hidden_layers": lambda: 2,
        "get_total_num_kv_heads": lambda: 4, "get_head_size": lambda: 64,
    }  # fmt: skip
    return SimpleNamespace(**{**fields, **changes})


def drafting(method="eagle3", draft=None, **changes):
    fields = {
        "method": method, "kv_cache_dtype": None, "parallel_drafting": False, "num_speculative_tokens": 3,
        "draft_model_config": draft or model("org/draft"),
        "uses_draft_kv_cache": lambda: method in ("eagle3", "mtp", "draft_model"),
    }  # fmt: skip
    return SimpleNamespace(**{**fields, **changes})


def config(mode="pull", speculative=None, tp=1, cache_dtype="auto", load_format="auto", **changes):
    return SimpleNamespace(
        load_config=SimpleNamespace(load_format=load_format, download_dir=None),
        model_config=model(**changes), speculative_config=speculative,
        cache_config=SimpleNamespace(cache_dtype=cache_dtype, block_size=16 * tp, num_gpu_blocks=100 * tp),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, tensor_parallel_size=tp),
        kv_transfer_config=SimpleNamespace(kv_connector="PDRelayConnector", kv_connector_extra_config={"mode": mode}),
    )  # fmt: skip


def differ(one, other):
    """Whether routers see it, and what peers read."""
    labels, theirs = info_labels(one), info_labels(other)
    return labels != theirs, mismatch(compared(one), compared(other))


def compared(one):
    return with_model(_from_config(one, Mode.PULL), one)


@pytest.fixture
def folder(tmp_path):
    """Return what makes a folder with a model."""

    def make(name, **choices):
        ensure_model(tmp_path / name, TinyModel(layers=1, **choices))
        return tmp_path / name

    return make


def test_equal_engines_have_equal_hashes():
    """Whatever their size, and in whatever process they are computed."""
    labels = info_labels(config())

    assert labels == info_labels(config(tp=2))
    assert labels.keys() == {"protocol", "fingerprint", "mode"}
    assert (labels["protocol"], labels["mode"]) == (str(PROTOCOL), "pull")
    assert len(bytes.fromhex(labels["fingerprint"])) == 8


def test_engines_of_other_modes_differ():
    """One would wait for what the other never sends."""
    labels = info_labels(config(mode="push"))

    assert labels["mode"] == "push"
    assert labels["fingerprint"] != info_labels(config())["fingerprint"]


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "org/other"}, {"dtype": "float16"}, {"quantization": "fp8"}, {"code_revision": "abc"},
        {"get_head_size": lambda: 128}, {"get_total_num_kv_heads": lambda: 8},
        {"get_total_num_hidden_layers": lambda: 3}, {"cache_dtype": "fp8"}, {"speculative": drafting()},
        {"hf_config": hf_config(rope_theta=5e5)}, {"load_format": "dummy"},
    ],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_whatever_decides_the_kv_is_in_it(changes):
    """Equal shapes with other contents are a wrong text with status 200."""
    is_seen, sentence = differ(config(), config(**changes))

    assert is_seen
    assert sentence.endswith("they must be equal")


def test_a_model_is_the_same_wherever_it_lies(folder):
    """P may load it from a mount, and D from the hub's cache, whose commit P does not know."""
    mounted, cached = config(name=folder("mnt")), config(name=folder("cache"), hf_config=hf_config(commit="aaa"))

    assert differ(mounted, cached) == (False, None)


def test_two_fine_tunes_of_one_path_differ(folder, tmp_path):
    """Both had one fingerprint, and D read the other model's KV with status 200."""
    served = tmp_path / "models"
    served.symlink_to(folder("a", seed=0))
    old = compared(config(name=served))
    labels = info_labels(config(name=served))
    served.unlink()
    served.symlink_to(folder("b", seed=1))
    new = compared(config(name=served))

    assert labels != info_labels(config(name=served))
    assert mismatch(old, new) == (
        f"it serves another model, or another revision of it: its weights are {new.weights!r}, "
        f"ours are {old.weights!r}; they must be equal"
    )


def test_another_tokenizer_is_another_model(folder):
    """A prompt that D does not tokenize itself would be answered in words that are another token's."""
    one, other = folder("a"), folder("b")
    tokenizer = other / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("river", "rover"))
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text() + " ")

    assert "its tokenizer is" in differ(config(name=one), config(name=other))[1]


def test_files_beside_the_model_do_not_matter(folder):
    """The hub's cache has fewer than a mount: templates and slow tokenizers are not fetched."""
    one, other = folder("a"), folder("b")
    (other / "tokenizer_config.json").unlink()
    (other / "README.md").write_text("A model.")

    assert differ(config(name=one), config(name=other)) == (False, None)


@pytest.mark.parametrize("load_format", ["dummy", "sharded_state", "tensorizer"])
def test_weights_that_are_not_read_are_known_by_their_place_and_names(folder, load_format):
    """Of two folders nothing is known that makes them one model; the sentence says what was compared."""
    one, other = (config(name=folder(name), load_format=load_format) for name in "ab")

    assert differ(one, one) == (False, None)
    assert f"(not read: load format {load_format})" in differ(one, other)[1]
    renamed = config(name=folder("a"), load_format=load_format, served_model_name="n")
    assert differ(one, renamed)[0]


def test_weights_in_an_object_store_are_known_by_their_address(folder):
    """vLLM has copied the rest into a folder with another name each time."""
    one, other = (config(name=folder(name), model_weights="s3://bucket/m", load_format="dummy") for name in "ab")

    assert differ(one, other) == (False, None)


def test_two_revisions_of_a_model_without_files_differ():
    """A rolling update starts engines at either side of a push to the hub, under one name."""
    assert "at revision bbb" in differ(config(revision=at("aaa")), config(revision=at("bbb")))[1]
    assert differ(config(revision="v1"), config(revision="v2"))[0]


def test_a_revision_by_two_names_is_one():
    """What counts is the commit; an engine without the hub has it from its cache."""
    offline = config(hf_config=hf_config(commit="aaa"))

    assert differ(config(revision=at("aaa")), config(revision=at("aaa", "v1"))) == (False, None)
    assert differ(config(revision=at("aaa")), offline) == (False, None)


def test_a_draft_model_on_one_side_is_refused_in_one_sentence():
    """Its layers' KV travels with the others: without them there is nothing to read, and every load would fail."""
    is_seen, sentence = differ(config(), config(speculative=drafting()))

    assert is_seen
    assert sentence.startswith("its draft model is 'eagle3 (config ")
    assert "weights those of org/draft at revision none" in sentence
    assert sentence.endswith("ours is 'none'; they must be equal")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (drafting(draft=model("org/a")), drafting(draft=model("org/b"))),
        (drafting(draft=model(revision=at("aaa"))), drafting(draft=model(revision=at("bbb")))),
        (drafting("eagle3"), drafting("mtp")),
        (drafting(kv_cache_dtype="fp8"), drafting()),
        (drafting(parallel_drafting=True), drafting()),
    ],
    ids=["model", "revision", "method", "cache dtype", "parallel"],
)
def test_draft_models_with_other_kv_differ(one, other):
    """As vLLM's NixlConnector distinguishes them."""
    assert differ(config(speculative=one), config(speculative=other))[0]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (drafting("ngram"), None),
        (drafting("suffix", draft=None), drafting("ngram")),
        (drafting(num_speculative_tokens=3), drafting(num_speculative_tokens=5)),
        (drafting(kv_cache_dtype="auto"), drafting()),
    ],
    ids=["n-grams", "suffixes", "tokens", "the cache's dtype by its name"],
)
def test_what_leaves_the_kv_alone_may_differ(one, other):
    """12 of 12 answers were right with n-grams on one side only."""
    assert differ(config(speculative=one), config(speculative=other)) == (False, None)


def test_two_versions_of_vllm_differ(monkeypatch):
    """What is a block to one may be something else to the other."""
    ours = compared(config())
    labels = info_labels(config())
    monkeypatch.setattr("pdrelay_connector.shell.fingerprint.VLLM_VERSION", "0.0.1")
    theirs = compared(config())

    assert labels != info_labels(config())
    assert mismatch(ours, theirs) == f"its vllm is '0.0.1', ours is {VLLM_VERSION!r}; they must be equal"


@pytest.mark.parametrize(
    "other", [CacheGroup(32, window=8), CacheGroup(32, chunk=8), CacheGroup(32, state="MAMBA2 state")], ids=repr
)
def test_groups_of_another_kind_differ(monkeypatch, other):
    """Blocks of another size may meet, layers that keep something else may not."""
    monkeypatch.setattr("pdrelay_connector.shell.fingerprint.get_current_attn_backends", lambda _: [])

    def of(group):
        return fingerprint(config(), Settings(), SimpleNamespace(groups=(group,)))

    assert mismatch(of(CacheGroup(32)), of(CacheGroup(16))) is None
    assert "they must be equal" in mismatch(of(CacheGroup(32)), of(other))

"""What must be equal, as peers compare it in a sentence and routers by a hash."""

import warnings
from types import SimpleNamespace

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from xpyd_connector.shell.fingerprint import _from_config, fingerprint, info_labels
    from xpyd_connector.shell.vllm_versions import VLLM_VERSION

from xpyd_connector.core.layout.cache_groups import CacheGroup
from xpyd_connector.core.messages import PROTOCOL
from xpyd_connector.core.session.peers import mismatch
from xpyd_connector.settings import Mode, Settings

pytestmark = pytest.mark.timeout(240)  # importing vLLM takes half a minute on a busy machine


class Revision(str):
    """What vLLM keeps: the name that was asked for, and the commit it stands for (huggingface_hub)."""

    resolved = ""


def at(commit, name="main"):
    revision = Revision(name)
    revision.resolved = commit
    return revision


def model(name="org/m", **changes):
    fields = {
        "model": name, "revision": None, "code_revision": None, "quantization": None, "dtype": "bfloat16",
        "hf_config": SimpleNamespace(_commit_hash=None), "get_total_num_hidden_layers": lambda: 2,
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


def config(mode="pull", speculative=None, tp=1, cache_dtype="auto", **changes):
    return SimpleNamespace(
        model_config=model(**changes), speculative_config=speculative,
        cache_config=SimpleNamespace(cache_dtype=cache_dtype, block_size=16 * tp, num_gpu_blocks=100 * tp),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, tensor_parallel_size=tp),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"mode": mode}),
    )  # fmt: skip


def differ(one, other):
    """Whether routers see it, and what peers read."""
    labels, theirs = info_labels(one), info_labels(other)
    return labels != theirs, mismatch(_from_config(one, Mode.PULL), _from_config(other, Mode.PULL))


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
    ],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_whatever_decides_the_kv_is_in_it(changes):
    """Equal shapes with other contents are a wrong text with status 200."""
    is_seen, sentence = differ(config(), config(**changes))

    assert is_seen
    assert sentence.endswith("they must be equal")


def test_two_revisions_of_a_model_differ():
    """A rolling update starts engines at either side of a push to the hub, under one name."""
    assert differ(config(revision=at("aaa")), config(revision=at("bbb"))) == (
        True,
        "its revision is 'bbb', ours is 'aaa'; they must be equal",
    )
    assert differ(config(revision="v1"), config(revision="v2"))[0]


def test_a_revision_by_two_names_is_one():
    """What counts is the commit; an engine without the hub has it from its cache."""
    offline = config(hf_config=SimpleNamespace(_commit_hash="aaa"))

    assert differ(config(revision=at("aaa")), config(revision=at("aaa", "v1"))) == (False, None)
    assert differ(config(revision=at("aaa")), offline) == (False, None)


def test_a_draft_model_on_one_side_is_refused_in_one_sentence():
    """Its layers' KV travels with the others: without them there is nothing to read, and every load would fail."""
    is_seen, sentence = differ(config(), config(speculative=drafting()))

    assert is_seen
    assert sentence.startswith("its draft model is 'eagle3 org/draft (revision none,")
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
    ours = _from_config(config(), Mode.PULL)
    labels = info_labels(config())
    monkeypatch.setattr("xpyd_connector.shell.fingerprint.VLLM_VERSION", "0.0.1")
    theirs = _from_config(config(), Mode.PULL)

    assert labels != info_labels(config())
    assert mismatch(ours, theirs) == f"its vllm is '0.0.1', ours is {VLLM_VERSION!r}; they must be equal"


@pytest.mark.parametrize(
    "other", [CacheGroup(32, window=8), CacheGroup(32, chunk=8), CacheGroup(32, state="MAMBA2 state")], ids=repr
)
def test_groups_of_another_kind_differ(monkeypatch, other):
    """Blocks of another size may meet, layers that keep something else may not."""
    monkeypatch.setattr("xpyd_connector.shell.fingerprint.get_current_attn_backends", lambda _: [])

    def of(group):
        return fingerprint(config(), Settings(), SimpleNamespace(groups=(group,)))

    assert mismatch(of(CacheGroup(32)), of(CacheGroup(16))) is None
    assert "they must be equal" in mismatch(of(CacheGroup(32)), of(other))

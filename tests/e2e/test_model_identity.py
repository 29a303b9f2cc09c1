"""Models that look alike: two fine-tunes of one architecture, from one path, under one name, on real engines.

Both had one fingerprint, because that told models apart by the path in ``--model``. The decode engine then read the
other model's KV: half of its answers were of neither model, with status 200, and counted as good loads.
"""

import shutil
from types import SimpleNamespace

import pytest

from pdrelay_tools.local.model import TinyModel, ensure_model
from pdrelay_tools.local.recipe import Connector, Role
from support.adapters import MAX_RANK, write_adapter
from support.cluster import MODEL_NAME, Watch, engine_spec, nothing_held, start_engine, wait_until
from support.legs import OPEN, decode, plain, prefill, prompt_of, text_of
from support.legs import _post as post
from support.questions import ask, client, ids

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

LOADS, SKIPPED = "vllm:pdrelay_loads_total", "vllm:pdrelay_loads_skipped_incompatible_total"
OTHER_ADAPTER, OBJECTIONS = "vllm:pdrelay_kv_params_other_adapter_total", "vllm:pdrelay_objections_total"
CHANGED, KEPT = "changed", "kept"  # adapters by their names at both engines


@pytest.fixture(scope="module")
def alike(fleet, model, tmp_path_factory):
    """A decode engine, a prefill engine with a copy of its model, and one with a fine-tune from the first one's path.

    The prefix cache is off: each prompt is computed, or loaded.
    """
    folder = tmp_path_factory.mktemp("alike")
    shutil.copytree(model, folder / "copy")
    ensure_model(folder / "tuned", TinyModel(seed=1))
    served = folder / "models"  # as a volume is mounted, or a link is turned in a rollout
    served.symlink_to(model)
    old, new = write_adapter(folder / "old", seed=1), write_adapter(folder / "new", seed=2)
    shutil.copytree(old, folder / "old-copy")
    lora = ("--enable-lora", "--max-lora-rank", MAX_RANK, "--max-loras", "2", "--no-enable-prefix-caching")
    options = {"connector": Connector.PDRELAY, "failure_policy": "fail"}
    d = engine_spec(
        "alike-d", served, role=Role.DECODE, **options,
        extra_args=(*lora, "--lora-modules", f"{CHANGED}={old}", f"{KEPT}={old}"),
    )  # fmt: skip
    same = engine_spec(
        "alike-same", folder / "copy", role=Role.PREFILL, **options,
        extra_args=(*lora, "--lora-modules", f"{CHANGED}={new}", f"{KEPT}={folder / 'old-copy'}"),
    )  # fmt: skip
    tuned = engine_spec("alike-tuned", served, role=Role.PREFILL, **options)
    children = [start_engine(fleet, spec) for spec in (d, same)]
    fleet.wait_ready(children, timeout_s=300)
    served.unlink()
    served.symlink_to(folder / "tuned")
    children.append(start_engine(fleet, tuned))
    fleet.wait_ready(children, timeout_s=300)
    yield SimpleNamespace(d=d, same=same, tuned=tuned)
    fleet.stop(*children)


def test_one_model_from_two_paths_is_one_model(alike):
    """P from a mount, D from somewhere else: the KV is loaded."""
    prompts = [prompt_of(number, 100) for number in range(40, 43)]
    with Watch(alike.d) as watch:
        texts = [text_of(decode(alike.d, prompt, prefill(alike.same, prompt))) for prompt in prompts]

    assert texts == [plain(alike.d, prompt) for prompt in prompts]
    assert watch.delta(LOADS) == len(prompts)


def test_two_models_from_one_path_are_two_models(alike, start_router):
    """Each answer is D's own model's, whoever leads the request there, and whether it names a model."""
    prompts = [prompt_of(number, 100) for number in range(43, 49)]
    right = [plain(alike.d, prompt) for prompt in prompts]
    assert right != [plain(alike.tuned, prompt) for prompt in prompts]
    with Watch(alike.d) as watch, Watch(alike.tuned) as theirs:
        texts = [text_of(decode(alike.d, prompt, prefill(alike.tuned, prompt))) for prompt in prompts]
        unnamed = [
            text_of(post(alike.d, {"prompt": prompt, "max_tokens": 16, "ignore_eos": True, "model": None,
                                   "kv_transfer_params": prefill(alike.tuned, prompt)}))
            for prompt in prompts
        ]  # fmt: skip
        wait_until(lambda: nothing_held(alike.tuned), seconds=20, what="P's leases are dropped")
    with client(start_router("router-alike", [alike.tuned], [alike.d])) as api:
        routed = [ask(api, ids(prompt)).text for prompt in prompts]

    assert texts == unnamed == right
    assert routed == right
    assert (watch.delta(LOADS), watch.delta(SKIPPED)) == (0, 2 * len(prompts))
    assert theirs.delta(OBJECTIONS) == 1


def test_an_adapter_is_told_by_its_weights(alike):
    """Both engines have two adapters by the same names; one of them has other weights at P."""
    prompts = [prompt_of(number, 100) for number in range(49, 52)]

    def ask_both(name, prompt):
        body = {"model": name, "prompt": prompt, "ignore_eos": True}
        params = post(alike.same, {**body, "max_tokens": 1, "kv_transfer_params": OPEN}).json()["kv_transfer_params"]
        return text_of(post(alike.d, {**body, "max_tokens": 16, "kv_transfer_params": params}))

    def ask_one(name, prompt):
        return text_of(post(alike.d, {"model": name, "prompt": prompt, "max_tokens": 16, "ignore_eos": True}))

    found = {}
    for name in (KEPT, CHANGED):
        with Watch(alike.d) as watch:
            texts = [ask_both(name, prompt) for prompt in prompts]
        found[name] = watch.delta(LOADS), watch.delta(OTHER_ADAPTER)
        assert texts == [ask_one(name, prompt) for prompt in prompts]
        assert texts != [ask_one(MODEL_NAME, prompt) for prompt in prompts]

    assert found == {KEPT: (len(prompts), 0), CHANGED: (0, len(prompts))}

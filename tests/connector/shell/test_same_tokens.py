"""Prompts with the same tokens, but another cache salt, LoRA adapter or image: none gets KV of another.

The model's KV depends on all of these here. vLLM's scheduler and its hashes of blocks are there, our whole connector,
and pull, push, leases and KV of answers that goes back.
"""

import inspect
import itertools
import random
import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's and torch's own, at their import
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.request import Request

    from pdrelay_connector.shell.returned_prefixes import CACHED_ON
    from support.cache_kinds import CONTEXT, KindsEngine, Pair
    from support.kinds_table import KINDS
    from support.scheduled_engine import kv_of, token_of

from support.adapters import write_adapter
from support.story_seeds import SEEDS, story_marks

pytestmark = story_marks(30)
# Whether vLLM's hashes have an adapter's path: 0.30 itself takes two of one name for one.
KNOWS_PATHS = "lora_path" in inspect.getsource(kv_cache_utils._gen_lora_extra_hash_keys)
IMAGE = PlaceholderRange(offset=2, length=6)  # in every prompt


class Engine(KindsEngine):
    """What a request has beside its tokens is like a token before them all."""

    def configure(self, config):
        transfer = config.kv_transfer_config
        transfer.kv_connector_extra_config = transfer.kv_connector_extra_config | {"return_kv": True}

    def others_of(self, name):
        return self.world.others[self.world.whose(name)]

    def chains_of(self, request, stop):
        number = list(self.world.others).index(self.world.whose(request.request_id))
        return kv_of([100 + number, *request.all_token_ids[:stop]])[1:]


class SamePair(Pair):
    """Requests are named after what they have."""

    engine_class = Engine
    prefill_params = {CACHED_ON: "d"}  # noqa: RUF012

    def __init__(self, shape, others):
        self.others = others
        super().__init__(shape, shape)

    @staticmethod
    def whose(name):
        return name.removeprefix("p-").partition(" ")[0]

    def next_token(self, name, tokens):
        return token_of(kv_of([100 + list(self.others).index(self.whose(name)), *tokens]))


@pytest.fixture
def others(tmp_path, monkeypatch):
    """All that tells requests with the same tokens apart; two adapters have one name."""
    monkeypatch.setattr(Request, "has_encoder_inputs", False)  # no encoder computes them here
    paths = [write_adapter(tmp_path / name, seed=seed) for seed, name in enumerate("ab")]
    adapters = [
        LoRARequest(lora_name="adapter" if KNOWS_PATHS else f"adapter {n}", lora_int_id=1 + n, lora_path=str(path))
        for n, path in enumerate(paths)
    ]
    images = [MultiModalFeatureSpec(None, "image", f"image {number}", IMAGE) for number in range(2)]
    return {
        "plain": {},
        "salt-a": {"cache_salt": "a"},
        "salt-b": {"cache_salt": "b"},
        "adapter-a": {"lora_request": adapters[0]},
        "adapter-b": {"lora_request": adapters[1]},
        "image-a": {"mm_features": images[:1]},
        "image-b": {"mm_features": images[1:]},
        "adapter-and-salt": {"lora_request": adapters[0], "cache_salt": "a"},
    }


def test_none_gets_kv_of_another(others):
    """Prompts have common beginnings, or go on from answers, and some come at once."""
    returned = 0
    for seed in range(SEEDS):
        dice = random.Random(seed)
        pair = SamePair(KINDS["full attention"].shape(blocks=60), others)
        trunk = dice.choices(range(3), k=CONTEXT)
        numbers = itertools.count()
        for _ in range(30):
            prompt = trunk[: dice.choice((20, 41, 60))]
            answered = [[*said, *more] for said, more, _ in pair.asked.values() if more and len(said) < CONTEXT - 30]
            if answered and dice.random() < 0.4:
                prompt = [*dice.choice(answered), 1]
            name = f"{dice.choice(list(others))} {next(numbers)}"
            pair.ask(name, prompt, dice.randrange(1, 9), dice.choice(("pull", "push", "pull", "push", "d", "p")))
            for _ in range(dice.choice((0, 1, 8))):
                pair.round()
        pair.run(30.0)

        assert pair.is_done
        assert len(pair.d.loaded) >= 5
        pair.run(60.0)
        assert [engine.pool.get_num_free_blocks() for engine in (pair.p, pair.d)] == [59, 59]
        returned += pair.p.connector.seen["prefixes_found"]

    assert returned >= SEEDS


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_router_that_mixes_them_up_costs_a_prefill(others, mode):
    """D is offered KV of the same tokens with something else."""
    prompt = [1] * 40
    for one, other in itertools.permutations(others, 2):
        if one != "plain" != other and one.split("-")[0] != other.split("-")[0]:
            continue  # each by itself is told from none
        pair = SamePair(KINDS["full attention"].shape(), others)
        name = f"{other} asked"
        pair.asked[name] = prompt, [], 3
        pair.awaited[f"p-{one} lent"] = lambda params: pair.d.ask(name, prompt, most=3, params=params)  # noqa: B023
        if mode == "push":
            pair.awaited.clear()
            where = {"remote_engine_id": pair.p.agent, "remote_host": pair.p.address.host}
            where |= {"remote_port": pair.p.address.port, "do_remote_prefill": True, "transfer_mode": "push"}
            pair.d.ask(name, prompt, most=3, params=where | {"transfer_id": f"{one} lent"})
        pair.prefill(f"{one} lent", prompt, mode)
        pair.run(8.0)

        assert pair.is_done, (one, other)
        assert pair.d.loaded == set(), (one, other)

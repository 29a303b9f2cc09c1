"""Engines with our connector and vLLM's OffloadingConnector in one MultiConnector, and chats that they serve."""

import dataclasses
import json
import random

import httpx

from pdrelay_tools.local.recipe import transfer_config
from support.cluster import ROOT, metrics

COMPUTED = "vllm:prompt_tokens_by_source_total|local_compute"
STORED, LOADED = "vllm:kv_offload_store_bytes_total", "vllm:kv_offload_load_bytes_total"
READ = "vllm:kv_offload_tiering_read_bytes_total"  # from files into memory
BUSY = (
    "vllm:kv_offload_cpu_cache_usage_perc",
    "vllm:kv_offload_tiering_active_promotion_jobs",
    "vllm:kv_offload_tiering_active_cascade_jobs",
)  # gauges of transfers that are under way
TIER_BYTES = 64 << 20
BLOCK = 32  # tokens
WORDS = 200
QUESTION = 150
ANSWER = 16


def with_tier(spec, folder, *, ours_first=True):
    """Return the same engine with a tier in memory and one of files behind it."""
    ours = transfer_config(spec)
    files = {"type": "fs", "root_dir": str(folder), "n_read_threads": 2, "n_write_threads": 2}
    offloading = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "HostOffloadingSpec",
            "spec_module_path": "support.offloading_on_cpu",
            "cpu_bytes_to_use": TIER_BYTES,
            "secondary_tiers": [files],
        },
    }
    config = {
        "kv_connector": "MultiConnector",
        "kv_role": ours["kv_role"],
        "kv_load_failure_policy": spec.failure_policy,
        "kv_connector_extra_config": {"connectors": [ours, offloading] if ours_first else [offloading, ours]},
    }
    return dataclasses.replace(
        spec,
        extra_args=(*spec.extra_args, "--kv-transfer-config", json.dumps(config)),
        extra_env={**spec.extra_env, "PYTHONPATH": str(ROOT / "tests")},
    )


def tier_rests(spec):
    """Tell whether nothing is under way between an engine's cache, memory and files."""
    return not any(metrics(spec).get(name) for name in BUSY)


class Chat:
    """A chat that goes on turn by turn; its words are a token each, so that a text keeps its tokens."""

    def __init__(self, words, seed, salt):
        self._dice = random.Random(seed)
        self._words = dict(list(words.items())[:WORDS])
        self._salt = salt
        self._messages = []
        self.answers = []
        self.prompts = []  # tokens of each turn's prompt

    def turn(self, url):
        """Ask the next question."""
        text = "".join(self._dice.choices(list(self._words.values()), k=QUESTION))
        self._messages.append({"role": "user", "content": text})
        body = {
            "model": "tiny",
            "messages": self._messages,
            "max_tokens": ANSWER,
            "temperature": 0,
            "cache_salt": self._salt,
            "allowed_token_ids": list(self._words),
        }
        response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120, trust_env=False)
        assert response.status_code == 200, response.text
        said = response.json()
        answer = said["choices"][0]["message"]["content"]
        self._messages.append({"role": "assistant", "content": answer})
        self.answers.append(answer)
        self.prompts.append(said["usage"]["prompt_tokens"])

    @property
    def new(self):
        """Return for each turn the tokens of its prompt that are not in whole blocks of the prompt before."""
        before = [0, *(tokens // BLOCK * BLOCK for tokens in self.prompts)]
        return [tokens - known for tokens, known in zip(self.prompts, before, strict=False)]

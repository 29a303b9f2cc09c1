"""Identifies a LoRA adapter: its KV differs from the base model's, and from other weights' KV."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from vllm.logger import init_logger

from pdrelay_connector.core.checkpoint import digest_of
from pdrelay_connector.errors import UnreadableCheckpoint
from pdrelay_connector.io.checkpoint_files import digest_weights, read_json, stamp_of
from pdrelay_connector.shell.model_files import local_folder

logger = init_logger("vllm.pdrelay")

MOST_KNOWN: Final = 4096  # adapters; those beyond are read again
_CONFIG: Final = "adapter_config.json"
# The first of these that is there, as vLLM chooses (vllm/lora/lora_model.py).
_WEIGHTS: Final = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
_OF_THE_PLACE: Final = frozenset(
    {"base_model_name_or_path", "revision", "inference_mode", "peft_version"}
)


class Adapter(Protocol):
    """As a request names it: vLLM's ``LoRARequest`` (``vllm/lora/request.py``)."""

    lora_name: str
    lora_path: str


@dataclass(frozen=True, slots=True)
class _Known:
    identity: str
    stamp: tuple[object, ...]  # of its files, when they were read


class AdapterIdentities:
    """The adapters that requests have named, by name and path.

    Everything runs on the engine thread.

    An adapter is read when a request names it first: vLLM tells a connector nothing of
    ``/v1/load_lora_adapter``. An engine that has seen two identities of one name and path shares no
    KV of it any more, however it was loaded: vLLM names the blocks of its prefix cache by name and
    path (``vllm/v1/core/kv_cache_utils.py``), so those of the first are found for the second; and
    it loads an adapter again for which it had no room.
    """

    def __init__(self) -> None:
        self._read_adapters: dict[tuple[str, str], _Known] = {}
        self._changed: set[tuple[str, str]] = set()
        self._own_mark = os.urandom(8).hex()  # equal to no other engine's

    def identity_of(self, adapter: Adapter) -> str:
        """Return an adapter's name and digest: engines exchange KV only if both are equal."""
        return f"{adapter.lora_name}:{self._identity(adapter)}"

    def has_changed(self, adapter: Adapter) -> bool:
        """Whether the engine may have KV of two states of this adapter."""
        self._identity(adapter)
        return (adapter.lora_name, adapter.lora_path) in self._changed

    def _identity(self, adapter: Adapter) -> str:
        key = adapter.lora_name, adapter.lora_path
        if key not in self._changed:
            folder = local_folder(adapter.lora_path, None, None)
            stamp = (
                () if folder is None else stamp_of(folder / name for name in (_CONFIG, *_WEIGHTS))
            )
            entry = self._read_adapters.get(key)
            if entry is not None and entry.stamp == stamp:
                return entry.identity
            identity = f"of {adapter.lora_path}, not read" if folder is None else _read(folder)
            if entry is None or entry.identity == identity:
                self._keep(key, _Known(identity, stamp))
                return identity
            self._changed.add(key)
            logger.warning(
                "pdrelay: the adapter %s at %s was %s and is %s now: no KV of it is handed over or "
                "loaded any more, because this engine may have blocks of both; load changed "
                "weights from another path",
                adapter.lora_name,
                adapter.lora_path,
                entry.identity,
                identity,
            )
        return f"changed since it was loaded, {self._own_mark}"

    def _keep(self, key: tuple[str, str], entry: _Known) -> None:
        if key not in self._read_adapters:
            logger.info(
                "pdrelay: the adapter %s is %s, whatever it is called", key[0], entry.identity
            )
            if len(self._read_adapters) >= MOST_KNOWN:
                del self._read_adapters[next(iter(self._read_adapters))]
        self._read_adapters[key] = entry


ADAPTERS: Final = AdapterIdentities()  # of this process, where it is a scheduler's


def _read(folder: Path) -> str:
    try:
        files = [file for name in _WEIGHTS if (file := folder / name).is_file()][:1]
        config = {
            name: value
            for name, value in read_json(folder / _CONFIG).items()
            if name not in _OF_THE_PLACE
        }
        return digest_of(
            sorted((name, repr(value)) for name, value in config.items()), [("", _bytes_of(files))]
        )
    except (UnreadableCheckpoint, OSError) as exc:
        return f"of {folder}, not read: {exc}"


def _bytes_of(files: list[Path]) -> bytes:
    return digest_weights(files).encode() if files else b""

"""What a LoRA adapter is: its KV differs from the base model's, and from that of other weights under the same name."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from vllm.logger import init_logger

from xpyd_connector.core.checkpoint import digest_of
from xpyd_connector.errors import UnreadableCheckpoint
from xpyd_connector.io.checkpoint_files import digest_weights, read_json, stamp_of
from xpyd_connector.shell.model_files import local_folder

logger = init_logger("vllm.xpyd")

MOST_KNOWN: Final = 4096  # adapters; those beyond are read again
_CONFIG: Final = "adapter_config.json"
# The first of these that is there, as vLLM chooses (vllm/lora/lora_model.py).
_WEIGHTS: Final = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
_OF_THE_PLACE: Final = frozenset({"base_model_name_or_path", "revision", "inference_mode", "peft_version"})


class Adapter(Protocol):
    """As a request names it: vLLM's ``LoRARequest`` (``vllm/lora/request.py``)."""

    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass(frozen=True, slots=True)
class _Known:
    identity: str
    stamp: tuple[object, ...]  # of its files, when they were read


class AdapterIdentities:
    """The adapters that requests have named. Everything runs on the engine thread.

    An adapter is read when a request names it first: vLLM has loaded it then. If its files change later, the engine may
    have either state of them (it loads an adapter again that it had no room for), so its KV is nobody else's.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, str], _Known] = {}
        self._changed = os.urandom(8).hex()  # equal to no other engine's

    def of(self, adapter: Adapter) -> str:
        """Return the name and what the adapter is; engines exchange KV of requests for which these are equal."""
        return f"{adapter.lora_name}:{self._identity(adapter)}"

    def _identity(self, adapter: Adapter) -> str:
        folder = local_folder(adapter.lora_path, None, None)
        if folder is None:
            return f"of {adapter.lora_path}, not read"
        stamp = stamp_of(folder / name for name in (_CONFIG, *_WEIGHTS))
        key = adapter.lora_name, adapter.lora_int_id, adapter.lora_path
        known = self._known.get(key)
        if known is not None and known.stamp == stamp:
            return known.identity
        if known is not None and not getattr(adapter, "load_inplace", False):
            return f"changed since it was loaded, {self._changed}"
        identity = _read(folder)
        if len(self._known) >= MOST_KNOWN:
            del self._known[next(iter(self._known))]
        self._known[key] = _Known(identity, stamp)
        logger.info("xpyd: the adapter %s is %s, whatever it is called", adapter.lora_name, identity)
        return identity


ADAPTERS: Final = AdapterIdentities()  # of this process, where it is a scheduler's


def _read(folder: Path) -> str:
    files = [file for name in _WEIGHTS if (file := folder / name).is_file()][:1]
    try:
        config = {name: value for name, value in read_json(folder / _CONFIG).items() if name not in _OF_THE_PLACE}
        return digest_of(sorted((name, repr(value)) for name, value in config.items()), [("", _bytes_of(files))])
    except UnreadableCheckpoint as exc:
        return f"of {folder}, not read: {exc}"


def _bytes_of(files: list[Path]) -> bytes:
    return digest_weights(files).encode() if files else b""

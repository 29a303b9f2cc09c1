"""Identifies a model by digests of its configuration, its tokenizer and its weights.

Its path does not: two engines may load one model from different places, and two models from one
place at different times.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from vllm.config import LoadConfig, ModelConfig

from pdrelay_connector.errors import UnreadableCheckpoint
from pdrelay_connector.io.checkpoint_files import (
    WEIGHT_PATTERNS,
    digest_weights,
    digest_whole,
    weight_files,
)
from pdrelay_connector.shell.model_config import digest_model_config
from pdrelay_connector.shell.model_files import NONE, commit_of, local_folder, revision_of

_CONSOLIDATED: Final = "consolidated*.safetensors"
_TENSORS: Final = "*.safetensors"
# As vLLM's loaders choose files (model_executor/model_loader/default_loader.py); others, of
# plug-ins among them, are taken to load what "auto" loads.
_PATTERNS: Final[Mapping[str, Sequence[str]]] = {
    **dict.fromkeys(
        ("safetensors", "fastsafetensors", "instanttensor", "runai_streamer"), (_TENSORS,)
    ),
    "hf": (_TENSORS, "*.bin", "*.pt"),
    "mistral": (_CONSOLIDATED,),
    "pt": ("*.pt",),
    "npcache": ("*.bin",),
}
# Loaders whose files differ with the ranks of an engine, or that read none.
_UNREAD: Final = frozenset(
    {"dummy", "sharded_state", "runai_streamer_sharded", "tensorizer", "ipc_cache", "modelexpress"}
)
# The first of these that is there; others beside it, of which a copy may lack some, say the same.
_TOKENIZERS: Final = (
    ("tokenizer.json",),
    ("tekken.json",),
    ("tokenizer.model",),
    ("vocab.json", "merges.txt"),
)


class ModelIdentity(NamedTuple):
    """Equal for two engines with interchangeable KV, as far as their models decide it."""

    config: str
    tokenizer: str
    weights: str


def identify(model: ModelConfig, load: LoadConfig) -> ModelIdentity:
    """Return the identity of a model; reads some MiB of its files."""
    return ModelIdentity(
        digest_model_config(model, load), _tokenizer(model, load), _weights(model, load)
    )


def _weights(model: ModelConfig, load: LoadConfig) -> str:
    """Return a digest of the weights; if they cannot be read, a text with their source."""
    load_format = str(load.load_format)
    if load_format in _UNREAD:
        return _unread(model, f"load format {load_format}")
    folder = local_folder(model.model, commit_of(model), load.download_dir)
    if folder is None:
        return _unread(model, "no files on this machine")
    patterns = _PATTERNS.get(load_format, WEIGHT_PATTERNS)
    files = [folder] if folder.is_file() else weight_files(folder, patterns)
    if not files:
        return _unread(model, f"no {' or '.join(patterns)}")
    try:
        return digest_weights(files)
    except UnreadableCheckpoint as exc:
        return _unread(model, str(exc))


def is_read(weights: str) -> bool:
    """Whether an identity is of the weights, and not only of the place that they are from."""
    return not weights.startswith(_PLACE)


_PLACE: Final = "those of "


def _unread(model: ModelConfig, reason: str) -> str:
    place = getattr(model, "model_weights", None) or model.model
    served = model.served_model_name
    names = served if isinstance(served, str) else ", ".join(map(str, served or ()))
    return f"{_PLACE}{place} at revision {revision_of(model)}, served as {names or model.model} (not read: {reason})"


def _tokenizer(model: ModelConfig, load: LoadConfig) -> str:
    name = str(model.tokenizer or model.model)
    revision = commit_of(model) if name == model.model else str(model.tokenizer_revision or "main")
    folder = local_folder(name, revision, None) or local_folder(name, revision, load.download_dir)
    if folder is None or not folder.is_dir():
        return NONE
    mistral_first = sorted(_TOKENIZERS, key=lambda names: names != ("tekken.json",))
    order = mistral_first if str(model.tokenizer_mode) == "mistral" else _TOKENIZERS
    for names in order:
        files = [folder / file_name for file_name in names]
        if all(file.is_file() for file in files):
            try:
                return digest_whole(files)
            except UnreadableCheckpoint:
                return NONE
    return NONE

"""Where the files of a model or an adapter lie on this machine: nothing here uses the network."""

from pathlib import Path
from typing import Final

from huggingface_hub import snapshot_download
from vllm.config import ModelConfig

NONE: Final = "none"


def revision_of(model: ModelConfig) -> str:
    """Return the commit of a model's weights; for a local path, the configured revision.

    vLLM 0.32 keeps the configured revision, with the commit in ``resolved`` if the hub was
    reachable (``transformers_utils/repo_utils.py``); transformers knows the commit of files from
    its cache.
    """
    commit = getattr(model.revision, "resolved", None) or getattr(
        model.hf_config, "_commit_hash", None
    )
    return str(commit or model.revision or NONE)


def commit_of(model: ModelConfig) -> str:
    """Return the revision by which the hub's cache knows a model's files."""
    revision = revision_of(model)
    return "main" if revision == NONE else revision


def local_folder(name: str, revision: str | None, cache: str | None) -> Path | None:
    """Return a model's or adapter's folder on this machine: a path, or a snapshot of the hub."""
    try:
        path = Path(name).expanduser()
        if path.exists():
            return path.absolute()
    except (OSError, RuntimeError):  # it may not be looked at, or "~" is no user's
        return None
    try:
        return Path(
            snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True)
        )
    except (OSError, ValueError) as exc:
        # Not in the cache, or no name of the hub: huggingface_hub's errors are of both kinds. A
        # snapshot that lacks files of the repository is an error, too (IncompleteSnapshotError),
        # though vLLM has fetched all that it reads.
        folder: object = getattr(exc, "snapshot_path", None)
        return None if folder is None else Path(str(folder))

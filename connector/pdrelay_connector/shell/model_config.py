"""A digest of a model's configuration, as its files and the engine's flags have it.

vLLM's own object (``ModelConfig.hf_config``) is no measure: models change it while they are loaded,
and only in the processes that load them. The scheduler of an engine with one rank is such a
process, that of an engine with two is not.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from vllm.config import LoadConfig, ModelConfig
from vllm.logger import init_logger
from vllm.transformers_utils.config import get_config

from pdrelay_connector.core.checkpoint import digest_config
from pdrelay_connector.errors import UnreadableCheckpoint
from pdrelay_connector.io.checkpoint_files import read_json
from pdrelay_connector.shell.model_files import commit_of, local_folder

logger = init_logger("vllm.pdrelay")

_TUNING: Final = "attn_temperature_tuning"
_TUNING_STARTS: Final = 32768  # tokens of a model's longest sequence


def digest_model_config(model: ModelConfig, load: LoadConfig) -> str:
    """Return a digest of the configuration with what ``--hf-overrides`` has changed.

    The live object is taken where the files cannot be read anew without the network.
    """
    folder = _folder(model, load)
    try:
        config: Any = _parse(model, folder)
    except Exception as exc:  # noqa: BLE001 -- the code of a model may run here, which may raise anything
        logger.warning(
            "pdrelay: the configuration of %s is compared as it is after the model was loaded (not "
            "read again: %s); an "
            "engine with another number of ranks may differ in it and compute its prompts itself",
            model.model,
            exc,
        )
        config = model.hf_config
    return digest_config(config.to_dict() | _options(model, folder))


def _folder(model: ModelConfig, load: LoadConfig) -> Path | None:
    name = str(model.hf_config_path or model.model)
    revision = commit_of(model) if name == model.model else str(model.revision or "main")
    return local_folder(name, revision, None) or local_folder(name, revision, load.download_dir)


def _parse(model: ModelConfig, folder: Path | None) -> Any:
    """Return vLLM's model configuration (``vllm/config/model.py``), from local files."""
    if folder is None:
        raise UnreadableCheckpoint("no files on this machine")
    if model.trust_remote_code and _has_code_elsewhere(folder):
        raise UnreadableCheckpoint("its code lies in another repository")
    overrides: Any = model.hf_overrides
    values: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    function: Callable[[Any], Any] | None = None
    if callable(overrides):
        function = overrides
    else:
        objects = {key: value for key, value in overrides.items() if isinstance(value, dict)}
        values = {key: value for key, value in overrides.items() if key not in objects}
    config: Any = get_config(
        str(folder),
        model.trust_remote_code,
        code_revision=model.code_revision,
        config_format=model.config_format,
        hf_overrides_kw=values,
        hf_overrides_fn=function,
    )
    if objects:
        model._apply_dict_overrides(config, objects)  # noqa: SLF001 -- vLLM has no public name for it
    return config


def _has_code_elsewhere(folder: Path) -> bool:
    """Whether a configuration names code of another repository, which transformers downloads."""
    file = folder / "config.json"
    classes = read_json(file).get("auto_map") if file.is_file() else None
    return isinstance(classes, dict) and "--" in str(classes.get("AutoConfig"))


def _options(model: ModelConfig, folder: Path | None) -> dict[str, object]:
    """Return the flags that a model copies into its configuration, and that affect its KV.

    Llama 4 alone does (``vllm/model_executor/models/llama4.py``).
    """
    architectures: list[str] = getattr(model.hf_config, "architectures", None) or []
    if not any(name.startswith("Llama4") for name in architectures):
        return {}
    overrides: dict[str, Any] = dict(model.override_generation_config)
    default: object = model.max_model_len > _TUNING_STARTS
    if model.generation_config not in ("auto", "vllm"):
        folder = local_folder(str(model.generation_config), None, None)
    file = None if folder is None else folder / "generation_config.json"
    if file is not None and file.is_file():
        default = read_json(file).get(_TUNING, default)
    return {_TUNING: overrides.get(_TUNING, default)}

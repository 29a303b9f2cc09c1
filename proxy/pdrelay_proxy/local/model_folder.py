"""The folder that engines load their model from: the reader's own as it is, ours made when it is missing."""

from pathlib import Path

from pdrelay_proxy.local.errors import LocalError
from pdrelay_proxy.local.plan import LocalPlan

TINY = LocalPlan().model


def check_model(model: Path) -> None:
    """Raise LocalError for what holds no model: engines are offline, so a name on the model hub is none either."""
    if model == TINY or model.is_file() or (model / "config.json").is_file():
        return
    raise LocalError(
        f"there is no model in {model}: --model takes a folder with a config.json, or a file. One on the model hub "
        f"must be fetched first (hf download {model} --local-dir FOLDER); without --model a tiny random one is made"
    )


def prepare_model(model: Path) -> str:
    """Make the tiny model if it is asked for and missing; return what is there in words. Raises LocalError."""
    check_model(model)
    if model != TINY:
        return f"{model}, as it is"
    from pdrelay_proxy.local.model import ensure_model  # noqa: PLC0415 (its libraries come with vLLM)

    return f"{model}, {'made' if ensure_model(model) else 'made earlier'}: random weights, 5 MB"

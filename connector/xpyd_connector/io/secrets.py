"""The secrets that engines share, read again when their file changes."""

import logging
from pathlib import Path

from xpyd_connector.errors import SettingsError
from xpyd_connector.io.files import Watched
from xpyd_connector.settings import SECRET_FILE_VARIABLE, Settings, parse_secrets

logger = logging.getLogger("vllm.xpyd")

MAX_FILE = 4096  # bytes


class SecretSource:
    """Call it for the secrets in force, the one to use first. A file that has become unusable changes nothing."""

    def __init__(self, settings: Settings) -> None:
        """Raises :exc:`~xpyd_connector.errors.SettingsError` if the file cannot be used."""
        self._path = settings.secret_file
        self._secrets = settings.secrets
        self._watched = Watched([self._path] if self._path else [])
        if self._path:
            self._secrets = read_secret_file(self._path)

    def __call__(self) -> tuple[bytes, ...]:
        """Return them; empty if none is set."""
        if self._watched.changed():
            try:
                self._secrets = read_secret_file(self._path)
            except SettingsError as exc:
                logger.warning("xpyd: the secrets in force stay: %s", exc)
            else:
                logger.info("xpyd: read %d secrets from %s again", len(self._secrets), self._path)
        return self._secrets


def read_secret_file(path: str) -> tuple[bytes, ...]:
    """Return the secrets in a file, one a line; raises :exc:`~xpyd_connector.errors.SettingsError`."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE + 1)
        text = data.decode()
    except (OSError, ValueError) as exc:
        raise SettingsError(f"{SECRET_FILE_VARIABLE} names {path!r}, which cannot be read: {exc}") from exc
    if len(data) > MAX_FILE:
        raise SettingsError(f"{path} is larger than {MAX_FILE} bytes; it must have one or two lines, a secret each")
    secrets = parse_secrets(text, path)
    if not secrets:
        raise SettingsError(f"{path} has no secret; it must have one or two lines, a secret each")
    return secrets

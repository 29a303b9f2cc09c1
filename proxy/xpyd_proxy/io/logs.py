"""How the log looks: lines for people, or one JSON object for each event."""

import json
import logging
import time
from datetime import UTC, datetime
from typing import Final

from xpyd_proxy.settings import LogFormat

_TEXT: Final = "%(asctime)s %(levelname)s %(name)s %(message)s"
FACTS: Final = "facts"  # logger.info(line, extra={FACTS: {...}}): what the line says, by name


class JsonFormatter(logging.Formatter):
    """One object a line: ``time`` (UTC), ``level``, ``logger``, and the facts of the event or its message."""

    def format(self, record: logging.LogRecord) -> str:
        """Write a record; what has facts has no message, for that would say the same again."""
        facts: object = getattr(record, FACTS, None)
        event: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        event |= facts if isinstance(facts, dict) else {"message": record.getMessage()}
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(event, default=str)  # a line break in a value is escaped: no value can forge a line


class TextFormatter(logging.Formatter):
    """Lines for people. The time is written anew once a second, and its milliseconds for each line."""

    def __init__(self) -> None:
        super().__init__(_TEXT)
        self._written = -1, ""  # the last second, and how it is written

    def format(self, record: logging.LogRecord) -> str:
        """Write a record as logging does; what comes with a traceback is left to it."""
        if record.exc_info or record.exc_text or record.stack_info:
            return super().format(record)
        return f"{self.formatTime(record)} {record.levelname} {record.name} {record.getMessage()}"

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802, ARG002 (logging's)
        """Write the time as logging does."""
        second = int(record.created)
        written, text = self._written
        if second != written:
            text = time.strftime(self.default_time_format, self.converter(second))
            self._written = second, text
        return f"{text},{int(record.msecs):03d}"


def configure(level: str, form: LogFormat) -> None:
    """Send the log of this process to standard error, in one of the two forms."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form is LogFormat.JSON else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs a line, with an address, for every leg

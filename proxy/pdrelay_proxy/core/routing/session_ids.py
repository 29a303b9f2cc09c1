"""Which header or field of a request names the conversation that it belongs to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pdrelay_proxy.core.raw_json import Fields, maybe

# The first one that a request has names its session. What names a user, and not one conversation,
# comes last.
HEADERS: Final = (
    "x-session-id",  # ours, and vLLM's router's; Crush and OpenCode send it, too
    "x-claude-code-session-id",  # Claude Code
    "session-id",  # Codex
    "session_id",  # earlier versions of Codex
    "x-session-affinity",  # OpenCode, Crush
    "x-opencode-session",
    "x-amp-thread-id",  # Amp
)
BODY_FIELDS: Final = (
    "prompt_cache_key",  # OpenAI: requests with equal ones share a cache
    "metadata.user_id",  # Anthropic; Claude Code writes the session into it
    "safety_identifier",  # OpenAI: the user
    "user",  # the same, of earlier clients
)
OF_BODY: Final = "body:"  # begins an operator's name of a field
# bytes of a session's id; a longer value names none, because hashing it would take too long
LONGEST: Final = 512


@dataclass(frozen=True, slots=True, init=False)
class SessionIds:
    """Where a session's id is looked for: an operator's names first, in their order, then those
    that clients use.
    """

    headers: Sequence[bytes]
    fields: Sequence[tuple[str, str]]  # a field of the body, and one in it; empty: the field itself

    def __init__(self, names: Sequence[str] = ()) -> None:
        """``names``: headers, and fields of the body (``body:metadata.thread``)."""
        headers = [name.lower() for name in names if not name.startswith(OF_BODY)]
        fields = [name.removeprefix(OF_BODY) for name in names if name.startswith(OF_BODY)]
        object.__setattr__(self, "headers", tuple(name.encode() for name in (*headers, *HEADERS)))
        object.__setattr__(self, "fields", tuple(_parts(name) for name in (*fields, *BODY_FIELDS)))

    def of(self, headers: Mapping[bytes, bytes], fields: Fields) -> str | None:
        """Return the id of a request's session: headers count before fields; None: it names none.

        ``headers``: by name, in lower case. An empty value and one that is no string name no
            session.
        """
        for header in self.headers:
            value = headers.get(header)
            if value and len(value) <= LONGEST:
                return value.decode("latin-1")
        for field, inner in self.fields:
            raw = fields.get(field)
            if raw is not None and (session := _text(bytes(raw), inner)):
                return session
        return None


def _parts(name: str) -> tuple[str, str]:
    field, _, inner = name.partition(".")
    return field, inner


def _text(raw: bytes, inner: str) -> str | None:
    if len(raw) > LONGEST:
        return None
    if not inner:
        return maybe(raw, str)
    value = (maybe(raw, dict[str, object]) or {}).get(inner)
    return value if isinstance(value, str) else None

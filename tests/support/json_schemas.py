"""jsonschema without the grammars of RFC 3987: they take 3 s of its import, and no schema here names their formats."""

import sys

sys.modules.setdefault("rfc3987_syntax", None)  # jsonschema does without what it cannot import

from jsonschema import Draft202012Validator  # noqa: E402

__all__ = ["Draft202012Validator"]

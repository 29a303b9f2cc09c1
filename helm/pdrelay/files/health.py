"""The probe of an engine that wants certificates of its clients, of which the kubelet's own probes
have none.

It shows the engine's own certificate. Exit code 0 if /health answers 200, else 1 with one sentence.
``--patient``: an engine that lives and whose certificate is no good is well, for a restart brings
no better one; it is not ready, though.
"""

import argparse
import ssl
import sys
import urllib.error

from drain import Engine, add_engine


def ill(engine: Engine, *, patience_s: float, patient: bool) -> str:
    """Say what the engine has; nothing: an empty string."""
    try:
        with engine.open("/health", patience_s=patience_s) as answer:
            return "" if answer.status == 200 else f"/health has status {answer.status}"
    except urllib.error.HTTPError as exc:
        return f"/health has status {exc.code}"
    except OSError as exc:
        reason = exc.reason if isinstance(exc, urllib.error.URLError) else exc
        return (
            ""
            if patient and isinstance(reason, ssl.SSLError)
            else f"no answer to /health: {reason}"
        )


def main() -> int:
    """Read the arguments, and ask."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add_engine(parser)
    parser.add_argument("--seconds", type=float, required=True, help="for the answer")
    parser.add_argument(
        "--patient",
        action="store_true",
        help="a certificate that is no good is no reason to restart",
    )
    args = parser.parse_args()
    said = ill(Engine(args), patience_s=args.seconds, patient=args.patient)
    sys.stderr.write(said and f"pdrelay health: {said}\n")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())

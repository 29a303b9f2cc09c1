"""What pdrelay costs, beside others: each folder writes a page of docs/benchmarks.

Nothing here fails a build.
"""

import sys
from pathlib import Path

# The benchmarks start engines and routers with the tests' own means (tests/support).
_TESTS = str(Path(__file__).parents[1] / "tests")
if _TESTS not in sys.path:
    sys.path.append(_TESTS)

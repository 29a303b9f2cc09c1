"""``python -m xpyd_connector.doctor``."""

import sys

from xpyd_connector.doctor.command import main

if __name__ == "__main__":
    sys.exit(main())

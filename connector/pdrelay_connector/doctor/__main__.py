"""``python -m pdrelay_connector.doctor``."""

import sys

from pdrelay_connector.doctor.command import main

if __name__ == "__main__":
    sys.exit(main())

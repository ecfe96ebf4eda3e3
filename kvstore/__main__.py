"""`python -m kvstore`: the same as the command `kvstore`."""

from __future__ import annotations

import sys

from kvstore.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

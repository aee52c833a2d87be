"""``python -m sdo`` is the command ``sdo``."""

from __future__ import annotations

import sys

from sdo.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

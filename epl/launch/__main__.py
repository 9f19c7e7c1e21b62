"""`python -m epl.launch` is `epl-launch`."""

from __future__ import annotations

import sys

from epl.launch.cli import main

sys.exit(main())

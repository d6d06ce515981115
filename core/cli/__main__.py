"""``python -m comfy_tp.core.cli``, for a pack that is not installed."""

import sys

from . import main

sys.exit(main())

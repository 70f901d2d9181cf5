"""``python -m ttv_train``, which launchers start."""

import sys

from ttv_train.cli import main

sys.exit(main())

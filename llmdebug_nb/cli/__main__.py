"""``python -m llmdebug_nb.cli``: the command line."""

import sys

from llmdebug_nb.cli import main

sys.exit(main())

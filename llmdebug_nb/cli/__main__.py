import sys

from llmdebug_nb.cli import main

sys.exit(main())

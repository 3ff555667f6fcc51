"""Names for users of msprobe: ``from llmdebug_nb.msprobe import PrecisionDebugger``."""

from llmdebug_nb.app.upstream.precision_debugger import PrecisionDebugger
from llmdebug_nb.core.determinism import seed_all

__all__ = ["PrecisionDebugger", "seed_all"]

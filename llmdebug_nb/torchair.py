"""Names for users of torchair: ``from llmdebug_nb.torchair import get_fx_dump_config``."""

from llmdebug_nb.app.convert import convert
from llmdebug_nb.app.upstream.torchair_config import get_fx_dump_config, get_ge_dump_config

__all__ = ["convert", "get_fx_dump_config", "get_ge_dump_config"]

"""Names for users of msit: ``from llmdebug_nb.msit import DumpConfig, register_hook``."""

from llmdebug_nb.app.topology import atb_json_to_onnx
from llmdebug_nb.app.upstream.dump_config import DumpConfig
from llmdebug_nb.app.upstream.register_hook import register_hook
from llmdebug_nb.core.determinism import seed_all

__all__ = ["DumpConfig", "atb_json_to_onnx", "register_hook", "seed_all"]

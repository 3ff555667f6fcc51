"""Names for users of msit: ``from llmdebug_nb.msit import DumpConfig, register_hook``."""

from llmdebug_nb.app.topology import atb_json_to_onnx
from llmdebug_nb.app.upstream.dump_config import DumpConfig
from llmdebug_nb.app.upstream.register_hook import register_hook
from llmdebug_nb.app.upstream.tensor_files import (
    convert_bin_data_to_npy,
    convert_bin_data_to_pt,
    get_bin_data_from_dir,
    read_bin_data,
    read_dump_data,
    save_npy_data,
    save_torch_data,
)
from llmdebug_nb.core.determinism import seed_all

__all__ = [
    "DumpConfig",
    "atb_json_to_onnx",
    "convert_bin_data_to_npy",
    "convert_bin_data_to_pt",
    "get_bin_data_from_dir",
    "read_bin_data",
    "read_dump_data",
    "register_hook",
    "save_npy_data",
    "save_torch_data",
    "seed_all",
]

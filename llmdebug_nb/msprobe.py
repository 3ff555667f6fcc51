"""Names for users of msprobe: ``from llmdebug_nb.msprobe import PrecisionDebugger``."""

from llmdebug_nb.app.upstream.precision_debugger import PrecisionDebugger
from llmdebug_nb.app.upstream.tensor_files import (
    convert_bin_data_to_npy,
    convert_bin_data_to_pt,
    get_bin_data_from_dir,
    parse_torchair_dump_data,
    read_bin_data,
    read_dump_data,
    save_npy_data,
    save_torch_data,
)
from llmdebug_nb.core.determinism import seed_all

__all__ = [
    "PrecisionDebugger",
    "convert_bin_data_to_npy",
    "convert_bin_data_to_pt",
    "get_bin_data_from_dir",
    "parse_torchair_dump_data",
    "read_bin_data",
    "read_dump_data",
    "save_npy_data",
    "save_torch_data",
    "seed_all",
]

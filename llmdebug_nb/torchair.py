"""Names for users of torchair: ``from llmdebug_nb.torchair import get_fx_dump_config``."""

from llmdebug_nb.app.convert import convert
from llmdebug_nb.app.upstream.tensor_files import (
    convert_bin_data_to_npy,
    parse_torchair_dump_data,
    read_dump_data,
)
from llmdebug_nb.app.upstream.torchair_config import get_fx_dump_config, get_ge_dump_config

__all__ = [
    "convert",
    "convert_bin_data_to_npy",
    "get_fx_dump_config",
    "get_ge_dump_config",
    "parse_torchair_dump_data",
    "read_dump_data",
]

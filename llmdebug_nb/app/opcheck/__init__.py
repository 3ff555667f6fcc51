"""opcheck: each recorded operator again on a reference, and its recorded output judged by it."""

from llmdebug_nb.app.opcheck.check import OpCheck as OpCheck
from llmdebug_nb.app.opcheck.check import opcheck as opcheck

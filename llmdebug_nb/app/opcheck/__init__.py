"""opcheck: each recorded operator again on a reference, and its recorded output judged by it."""

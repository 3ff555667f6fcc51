"""Which record of one run answers to which of the other."""

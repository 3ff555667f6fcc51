"""Pairing the records of two runs: each record of golden with its partner in mine."""

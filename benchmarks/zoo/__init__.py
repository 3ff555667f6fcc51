"""Planted bugs and benign changes that comparing and blaming is scored on: ``python benchmarks/zoo/score.py``."""

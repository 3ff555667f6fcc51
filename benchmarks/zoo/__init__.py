"""Planted bugs and benign changes that score the comparison: ``benchmarks/zoo/score.py``."""

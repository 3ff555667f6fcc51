"""Measuring pairs and judging what was measured."""

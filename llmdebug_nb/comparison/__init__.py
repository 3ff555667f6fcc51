"""Measuring pairs of tensors, and judging the errors."""

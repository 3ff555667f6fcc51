"""Comparing two programs that run side by side, without dumps."""

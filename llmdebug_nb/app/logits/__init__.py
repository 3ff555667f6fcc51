"""Comparing logits token by token: of runs, of other tools' dumps, and of live models."""

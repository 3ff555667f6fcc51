"""The tensors and calls of a run as a graph: who made what, and who takes it."""

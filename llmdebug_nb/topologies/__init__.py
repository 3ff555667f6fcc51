"""The structure of a model: its module tree."""

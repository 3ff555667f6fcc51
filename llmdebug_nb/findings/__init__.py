"""Make the findings of a comparison: the calls to blame, their causes, lines and scripts."""

"""Recording: what a program computes becomes records, without changing what it computes."""

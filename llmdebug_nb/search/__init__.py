"""Find the calls where two programs part for good."""

"""Find why the calls of a region give another result."""

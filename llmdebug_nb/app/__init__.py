"""Use cases: record, open, compare, launch, step, export. Front ends call these alone."""

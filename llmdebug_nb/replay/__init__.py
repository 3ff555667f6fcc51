"""Compute a recorded call again, on its recorded inputs or on others."""

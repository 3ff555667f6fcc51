"""The numeric work over bytes: one-pass summaries and fingerprints."""

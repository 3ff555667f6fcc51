"""Runs in remote stores, as far as fsspec reaches: read in place, and uploaded to."""

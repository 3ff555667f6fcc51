"""Dumps on disk: writing the native format, opening it and foreign layouts as a Run."""

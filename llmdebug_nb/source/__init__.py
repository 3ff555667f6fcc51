"""The lines of both programs, side by side."""

"""Showing runs and comparisons: views as JSON-ready data, and text and HTML made from them."""

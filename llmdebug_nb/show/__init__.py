"""What is shown: JSON-ready view models first, then text and HTML made from them."""

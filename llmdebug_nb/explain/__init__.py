"""The search for the call that made an error, among all calls that differ."""

"""References: what the calls of a recording should have given, computed in float64."""

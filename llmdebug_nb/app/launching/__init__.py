"""Recording an unedited program, in each of its Python processes that runs a model."""

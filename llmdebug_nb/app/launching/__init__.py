"""Recording an unedited program: each of its Python processes that runs a model records it."""

"""Recording a program that nobody edits: it is started with a hook in its way, and every process of it that runs a model records it."""

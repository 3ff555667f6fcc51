"""Recording: the tensors of a program become records. The program computes the same as before."""

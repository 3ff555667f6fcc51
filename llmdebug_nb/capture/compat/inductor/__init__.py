"""The only home of Inductor's internals: recording the buffers of compiled kernels.

Inductor turns a graph into a Python function that calls kernels on buffers. While one of our graphs
is compiled, a line is added before and after each kernel call; it passes the kernel's buffers to a
`KernelObserver`. Everything else is unchanged, so the kernels and their results are the same. Code
compiled this way never enters Inductor's caches.
"""

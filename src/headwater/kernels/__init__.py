"""How kernels are written, compiled, stored and called. A kernel is a function that numba compiles: it works on whole
buffers, without a Python object per item.

The kernels themselves are beside their callers: those that read the wire in `protocol.kernels`, those of the store in
`store`. Import `memory` to write one.
"""

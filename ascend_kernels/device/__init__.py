"""The Triton kernels, without torch; importing a module here needs the package triton, or triton-ascend, which installs
under that name.

Written for both: no atomics, no descriptors, no libdevice, `tl.dot` on blocks of at least 16 rows, masks from ranges,
and only arithmetic that triton-ascend 3.2 lowers to linalg.
"""

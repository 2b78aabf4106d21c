"""The kernels themselves: Triton alone, without torch; importing a module here needs the package triton, or
triton-ascend, which installs itself under that name.

Written for both: no atomics, no descriptors, no libdevice, `tl.dot` on blocks of 16 rows or more, masks from ranges,
and only arithmetic that triton-ascend 3.2 lowers to linalg.
"""

"""Triton kernels with one source for triton-ascend and CUDA; imported as `mindspeed_cp.ascend_kernels`, always.

There are none in this version: the operators of `mindspeed_cp.ops` run on the CPU.
"""

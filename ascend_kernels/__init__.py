"""Triton kernels with one source for triton-ascend and CUDA, each with a torch implementation beside it. Import them as
`mindspeed_cp.ascend_kernels`.

The kernels are in `device`, which needs the package triton. The functions of the modules here do not: on a CPU they
compute in torch, and on a device without triton they raise an error that names the missing package.
"""

"""`mindspeed-cp doctor --cluster`: measures the links, kernels and algorithms of all ranks, compares them with the
simulator, and writes one report and one archive.

On every rank a supervisor takes part in the agreement over a store, and a worker, a process of its own, holds the
device and measures. A worker that fails or hangs is ended and started again; what it had measured is kept, and its
message becomes a row of the report::

    rank 0      coordinator -- supervisor -- worker        torchrun starts the left column,
    rank 1            store -- supervisor -- worker        which imports no device library
"""

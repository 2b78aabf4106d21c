"""A small cluster on one machine, real processes and messages over links with limits, beside the simulator's times.

    python -m benchmarks.cluster [clean] [--preset a800] [--nodes 2] [--ranks-per-node 4] [--rates 25 12.5]
        [--sets wikipedia prolong one] [--batches 5] [--tokens 4096] [--lengths-folder DIR] [--seed 0]
        [--heads 32] [--kv-heads 32] [--head-dim 128] [--wire-dim 2] [--repeat 3] [--json FILE]

Needs root and iproute2 (ip, tc), and says so. Every rank is a process in a network namespace of its own; NICs are
pairs of interfaces limited by tc (`network.py` draws it); gloo carries the bytes. What is made has names with this
program's process number, and is removed at the end, on failure and on Ctrl-C. Only if the program itself is killed
(SIGKILL) something stays: `clean` removes what such runs left, and nothing else.

Measured is forward and backward of one attention layer by the project's engine, with plans of build_plan, for batches
drawn from the lengths of real documents, and for one long document. The time is that of the slowest rank, from one
moment that all ranks agree on, the median of the repeats.

What is real: processes, plans, engine, messages, their bytes, NICs that fill up, waits. What is modelled: kernels
sleep for the time that the cost model gives them (`layer.py`), since eight ranks cannot compute in parallel on a few
cores; results are not computed. Rows are narrower than real ones and NICs slower, by one factor that is printed
(`scale.py`): lengths of documents, tiles and messages are the real ones. Not emulated: latencies of the network, which
are the emulation's own, and memory bandwidth.

Every run proves its bytes: what each rank hands to gloo is what its plan says, to the byte, or the program fails.
"""

"""A small cluster on one machine: real processes, real messages, links with limits.

    python -m benchmarks.cluster [mesh] [layer] [clean]     both measurements, if none is named
        [--preset a800] [--nodes 2] [--ranks-per-node 4] [--rate 100] [--in-node preset|free|mesh|switch]
        [--sets wikipedia prolong one] [--batches 5] [--tokens 4096] [--lengths-folder DIR] [--seed 0]
        [--heads 32] [--kv-heads 32] [--head-dim 128] [--wire-dim 2] [--linear]
        [--only NAME ...] [--kernels modelled|run] [--repeat 3] [--json FILE]

Needs root and iproute2 (ip, tc), and says so. Every rank is a process in a network namespace of its own; NICs are
pairs of interfaces limited by tc (`network.py` draws it); gloo carries the bytes. What is made has names with this
program's process number, and is removed at the end, on failure and on Ctrl-C. Only if the program itself is killed
(SIGKILL) something stays: `clean` removes what such runs left, and nothing else.

mesh    One node with a link for each pair of ranks (preset a2): the ring against direct.
layer   Forward and backward of one attention layer by the project's engine, with plans of build_plan, for batches drawn
        from the lengths of real documents, and for one long document. The time is that of the slowest rank, from one
        moment that all ranks agree on; a figure is the median of the repeats of a batch, then mean, minimum and
        maximum over batches. With --linear the layer's linear part takes its modelled time as well: only then does it
        show what a layout of its own for it (remap) is worth.

What is real: processes, plans, engine, messages, their bytes, NICs that fill up, waits. What is modelled: with
--kernels modelled (the default) kernels sleep for the time that the cost model gives them (`modelled.py`), since
eight ranks cannot compute in parallel on a few cores; results are then not computed. With --kernels run they are, by
the cpu backend, at the speed of this machine, and the ratio of compute to communication is no preset's. Rows are
narrower than real ones and NICs slower, by one factor that is printed (`scale.py`): lengths of documents, tiles and
messages are the real ones. Not emulated: latencies of the network, which are the emulation's own, and memory
bandwidth.

Every run proves its bytes: what each rank hands to gloo is what its plan says, to the byte, or the program fails;
what the NICs counted is shown beside what was handed over for other nodes (acknowledgements and, for short messages,
headers make it a little more). `busiest NIC` is the share of its rate that the busiest direction of a NIC has over the
whole time, `cores` are those of this machine that were busy, and how many of them the ranks kept busy themselves.
"""

"""Published systems and this project's planner on the same batches, modelled side by side.

    python -m benchmarks.published [--clusters a800 h200 a2 a3] [--ranks 16 32 64 128] [--lengths wikipedia prolong]
                                   [--heads mha gqa8] [--batches 4] [--basis 1 2] [--seed 0] [--bf16]
                                   [--token-bound 1.5] [--no-sensitivity] [--markdown FILE] [--json FILE]
                                   [--further [equal bimodal pareto one-giant share+1]]

Every system runs the same documents by plans that verify_plan can prove, timed by the event simulation of
mindspeed_cp.simulate on the presets of configs/clusters: nothing is measured. `systems` says for each where it is
from and what was assumed; what a paper leaves open was chosen in its favour, and a system that has options counts by
the fastest of them in each batch, while ours is the one plan that its planner makes.

Basis 1: one packed row over all ranks, against the even-split ring over all of them. Basis 2: contexts of 64K on 64
ranks, against an even-split ring CP16 x DP4: four rows of 64K tokens, and the slowest of the four counts. Systems that
place documents treat the same documents as one pool of 64 ranks.

Further sets: lengths that corpora do not have (benchmarks/data.py), on 64 ranks, as one row and as contexts of
64K; a set whose batches are all equal has one batch. `--further` alone leaves them out, `--basis` alone all others.

Columns: time of the even ring (ms of one layer, forward and backward, with its linear layers); how many times as fast
each system is (mean of the batches); ours over the fastest published system of each batch, mean and least; and the
fraction of the bound that ours reaches. The bound is perfect balance of all ranks with nothing exposed.

Every table is printed without and with a bound of the tokens that a rank may hold (--token-bound, times the mean):
ours and FlexSP plan by it, of other systems those of their plans count that keep it.

--bf16 lets gradients of keys and values travel in bf16 in all systems but ours.
The sensitivity lines run plans made by the preset on clusters that are otherwise than it says; other systems' options
are chosen anew by what the cluster really is, ours are not.
"""

"""Plans that one rank of a machine makes for the others: who does it, what travels, and over which sockets.

Without it every rank plans alone, the same plans as all others that share them. With it, the first of these ranks on
each machine is their planner: it sends each of the others its slice (:mod:`mindspeed_cp.plan.rank_slice`), with the
fingerprints of the whole plan, by which ranks compare it over machines as ever::

    machine 0   rank 0 plans ──► ranks 1 .. 7        nothing crosses machines; the planners make
    machine 1   rank 8 plans ──► ranks 9 .. 15       equal plans, since a plan is a pure function

The training command shares plans in the threads that make batches (`train.planner`), scripts of Megatron in their
``get_batch`` (``--cp-plan-planner``).
"""

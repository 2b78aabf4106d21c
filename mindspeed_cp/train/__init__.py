"""Training on Megatron-core: launch local ranks, build the model, feed it planned batches, keep its state on disk.

    launch     starts the ranks, turns what happens to them into one line and an exit code
    worker     one rank: environment, process groups, errors
    loop       the steps of a run
    model      settings -> GPT, DDP, optimizer, schedule
    batches    packed rows -> planned micro-batches, made ahead in a thread
    checkpoint state on disk, atomic

Importing this package imports neither torch nor Megatron.
"""

"""Training on Megatron-core: launch local ranks, build the model, feed it planned batches, keep its state on disk.

    launch     starts the ranks, reports how they ended in one line and an exit code
    worker     one rank: environment, process groups, errors
    loop       the steps of a run
    model      GPT, DDP, optimizer, schedule from the settings
    micro_batch_loader   planned micro-batches, made ahead in a thread
    checkpoint state on disk, atomic

Importing this package imports neither torch nor Megatron.
"""

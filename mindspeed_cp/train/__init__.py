"""A small trainer on Megatron-core: planned micro-batches in, optimizer steps, metrics and checkpoints out.

    launch              the ranks of this machine as processes
    failures            how a rank ends: one line and an exit code
    world               one rank among all: device, process groups, numbers
    model               GPT, DDP, optimizer, schedule from the settings
    micro_batch_loader  planned micro-batches, made ahead in a thread
    step                one optimizer step
    loop                the steps of a run
    checkpoint          state on disk, by torch.distributed.checkpoint
    run_files, output   what else a run writes and shows
    checks              what ends a run, or skips a step, before wrong numbers are kept

Importing this package imports neither torch nor Megatron.
"""

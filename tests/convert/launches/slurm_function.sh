#!/bin/bash
#SBATCH --nodes=2
#SBATCH --gpus-per-node=4
PROCS=4
launch() {
    local rank=$1
    torchrun --nproc_per_node $PROCS --nnodes 2 --node_rank $rank train.py \
        --context-parallel-size 8 --cp-comm-type allgather --moe-token-dispatcher-type allgather \
        --expert-model-parallel-size 4 --num-experts 8 --num-attention-heads 6 --train-samples 1_000 \
        --data-path 0.5 "data/a b" 0.5 data/c
}
case "$SLURM_NODEID" in
    0) launch 0 ;;
    *) launch 1 ;;
esac

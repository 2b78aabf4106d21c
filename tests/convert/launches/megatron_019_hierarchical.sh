#!/bin/bash
# Megatron 0.19: a2a inside, p2p outside; cu_seqlens from the data loader.
OPTIONS=" \
    --context-parallel-size 8 \
    --cp-comm-type a2a+p2p \
    --hierarchical-context-parallel-sizes 2 4 \
    --dataloader-inter-document-masking \
    --no-rope-fusion \
    --calculate-per-token-loss \
    --num-attention-heads 8 \
    --position-embedding-type rope \
    --window-size 1024,0 \
    --recompute-granularity selective --recompute-modules core_attn mlp"
DIR=$(pwd)
run_cmd="python -u ${DIR}/pretrain_gpt.py ${OPTIONS}"
srun -l --container-image "$IMAGE" sh -c "${run_cmd}"

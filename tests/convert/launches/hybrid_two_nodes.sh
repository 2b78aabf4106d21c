#!/usr/bin/env bash
set -euo pipefail
GPUS=8
NODES=2
DIST=(
    --nproc-per-node "$GPUS"
    --nnodes "$NODES"
)
MODEL=(
    --num-attention-heads 16   # query heads
    --num-query-groups 4
    --position-embedding-type rope
    --attention-mask-type causal
)
PARALLEL=(
    --tensor-model-parallel-size 2
    --context-parallel-size 8
    --context-parallel-algo hybrid_cp_algo
    --ulysses-degree-in-cp "4"
)
torchrun "${DIST[@]}" pretrain_gpt.py "${MODEL[@]}" "${PARALLEL[@]}" --bf16 2>&1 | tee log.txt

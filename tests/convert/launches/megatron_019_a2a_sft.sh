#!/bin/bash
ARGS=""
ARGS+=" --context-parallel-size 2 --cp-comm-type a2a"
ARGS+=" --sft --micro-batch-size 1"
ARGS+=" --num-attention-heads 8 --position-embedding-type none"
ARGS="$ARGS --num-experts 8 --expert-model-parallel-size 2"
if [ -n "${DEBUG:-}" ]; then
    ARGS+=" --log-throughput"
fi
exec torchrun --nproc-per-node=2 -m my_package.train $ARGS

#!/bin/bash
CP=4
GPT_ARGS="
    --context-parallel-size ${CP} \
    --context-parallel-algo adaptive_cp_algo \
    --attention-mask-type general \
    --reset-attention-mask \
    --reset-position-ids \
    --adaptive-cp-only-reschedule \
    --attention-mask-on-cpu \
    --num-attention-heads 8 \
"
torchrun --nproc_per_node 4 pretrain_gpt.py $GPT_ARGS

#!/bin/bash
CP=8
WINDOW=$((CP / 2))
GPT_ARGS="
    --context-parallel-size $CP
    --cp-window-size $WINDOW
    --context-parallel-algo megatron_cp_algo
    --use-cp-send-recv-overlap
    --megatron-cp-in-bnsd
    --num-attention-heads 4
"
python pretrain_gpt.py $GPT_ARGS

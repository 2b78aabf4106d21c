#!/bin/bash
GPT_ARGS="
    --context-parallel-size 4 \
    --context-parallel-algo megatron_cp_algo \
    --position-embedding-type alibi \
    --alibi-fusion-attn-type 2 \
    --square-alibi-mask \
    --fill-neg-inf \
    --attention-mask-type causal \
    --num-attention-heads 12 \
"
torchrun --nproc_per_node 4 pretrain_gpt.py $GPT_ARGS

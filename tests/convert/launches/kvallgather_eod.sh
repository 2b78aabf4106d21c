#!/bin/bash
# Packed documents, ended by EOD, over an all-gather of keys and values.
CP_TYPE='kvallgather_cp_algo'
CKPT="some folder/ckpt"
GPT_ARGS="
    --transformer-impl transformer_engine \
    --context-parallel-size 4 \
    --context-parallel-algo ${CP_TYPE} \
    --reset-attention-mask \
    --reset-position-ids \
    --eod-mask-loss \
    --attention-mask-type causal \
    --variable-seq-lengths \
    --num-attention-heads 8 \
"
torchrun --nproc_per_node 8 pretrain_gpt.py $GPT_ARGS \
    --load "${CKPT}" \
    --save "${CKPT}"

#!/bin/bash
# Fine-tuning on packed samples.
NPUS_PER_NODE=8
TP=4; CP=2; SEQ=32768
ATTN="--reset-attention-mask --no-pad-to-seq-lengths"
TUNE_ARGS="
    --stage sft \
    --is-instruction-dataset \
    --neat-pack \
    --padded-samples \
"
torchrun --nproc_per_node $NPUS_PER_NODE posttrain_gpt.py \
    $TUNE_ARGS $ATTN \
    --tensor-model-parallel-size $TP --context-parallel-size $CP \
    --context-parallel-algo=ulysses_cp_algo \
    --kv-head-repeat-before-uly-alltoall \
    --num-attention-heads 32 --seq-length $SEQ \
    --num-query-groups 8 --position-embedding-type rope --use-fused-rotary-pos-emb \
    --load $CKPT_LOAD_DIR \
    | tee log

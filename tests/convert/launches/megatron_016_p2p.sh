#!/bin/bash
# Megatron 0.16, positional parameters, arrays, arguments of the caller.
export CUDA_DEVICE_MAX_CONNECTIONS=1
CHECKPOINT_PATH=${1:-"checkpoints/llama"}
CP_SIZE=${CP_SIZE:-4}
SEQ_LENGTH=32768

MODEL_ARGS=(
    --use-mcore-models
    --num-layers 32
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --seq-length $SEQ_LENGTH
    --position-embedding-type rope
    --attention-backend fused
)
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 2
    --context-parallel-size $CP_SIZE
    --cp-comm-type p2p
    --sequence-parallel
)
DATA_ARGS=(--mock-data --reset-position-ids --reset-attention-mask)

torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py \
    ${MODEL_ARGS[@]} \
    ${MODEL_PARALLEL_ARGS[@]} \
    ${DATA_ARGS[@]} \
    --save "$CHECKPOINT_PATH"

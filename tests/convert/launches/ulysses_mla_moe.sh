#!/bin/bash
# MLA with experts under Ulysses, in the manner of MindSpeed-LLM.
NPUS_PER_NODE=16
NNODES=4
TP=1
PP=4
VPP=2
EP=16
CP=4
CP_TYPE='ulysses_cp_algo'

DISTRIBUTED_ARGS="--nproc_per_node $NPUS_PER_NODE --nnodes $NNODES --node_rank ${RANK:-0}"

MLA_ARGS="
    --multi-latent-attention \
    --qk-pos-emb-head-dim 64 \
    --qk-head-dim 128 \
    --q-lora-rank 1536 \
    --kv-lora-rank 512 \
    --v-head-dim 128 \
    --mla-fa-without-pad \
"

MOE_ARGS="
    --moe-grouped-gemm \
    --moe-token-dispatcher-type alltoall \
    --num-experts 64 \
    --expert-model-parallel-size ${EP} \
    --moe-router-topk 6 \
    --moe-router-load-balancing-type aux_loss \
"

GPT_ARGS="
    --spec my_team.specs.latent layer_spec \
    --shape-order BNSD \
    --tensor-model-parallel-size ${TP} \
    --pipeline-model-parallel-size ${PP} \
    --num-layers-per-virtual-pipeline-stage $VPP \
    --context-parallel-size ${CP} \
    --context-parallel-algo  ${CP_TYPE} \
    --num-attention-heads 16 \
    --position-embedding-type rope \
    --use-fused-rmsnorm \
    --swap-attention \
"

python -m torch.distributed.launch $DISTRIBUTED_ARGS pretrain_gpt.py \
    $GPT_ARGS \
    $MLA_ARGS \
    $MOE_ARGS

#!/bin/bash
python pretrain_gpt.py --context-parallel-size 4 \
    --hybrid-context-parallel \
    --max-seqlen-per-dp-cp-rank 2048 \
    --calculate-per-token-loss \
    --num-attention-heads 8

# No algorithm is named, and the last of two sizes counts.
python3 pretrain_gpt.py --context-parallel-size 2 --num-attention-heads 4 --context-parallel-size 4 --softmax-type vanilla

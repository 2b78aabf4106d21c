"""The varlen ring of MiniMax-01: how uneven packed rows make it, and what recovers how much.

    python -m benchmarks.varlen_ring [--cluster h800] [--replicas 4] [--ranks 8] [--rows 4] [--context 131072]
                                     [--long 0 30 50 70 100] [--batches 4] [--seed 0] [--png FILE] [--csv FILE]

A varlen ring (arXiv 2501.08313) runs one ring over the whole packed row; the mask says where documents end. Rows then
take unequal time: ranks of a ring wait for the one whose slice has the long documents, and replicas wait for the one
with long documents (MiniMax-AI/MiniMax-01, issue 6). One layer of softmax attention of that model (64 heads of 128
channels, 8 of keys, hidden size 6,144, two experts of 9,216) is simulated, forward and backward, on every micro-batch
of every replica; nothing is measured. The model's lengths are not public: of the tokens, --long percent are in
documents of 32K tokens up to the context, the others in documents of 256 tokens up to 32K, both log-uniform.

step      seconds of the slowest replica over perfect balance: all work even over all ranks, nothing exposed
experts   the same where replicas wait for each other in every micro-batch, as for experts that are spread over them
replicas  slowest replica over their mean
inside    busiest rank over the mean of its ring, on average over micro-batches
recovers  part of what the varlen ring loses against perfect balance
"""

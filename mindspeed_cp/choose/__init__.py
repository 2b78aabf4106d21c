"""Choice of an algorithm and its options for given batches on a cluster.  NumPy only."""

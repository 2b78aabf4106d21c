"""Which ranks share each document: the search of algorithm hierarchical. Begin with :mod:`.search`.  NumPy only."""

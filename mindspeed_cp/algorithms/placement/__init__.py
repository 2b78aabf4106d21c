"""Which ranks share each document: layouts by name, and the search of algorithm hierarchical.  NumPy only."""

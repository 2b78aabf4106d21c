"""Documents, packed rows, and their assignment to data-parallel replicas.  NumPy only."""

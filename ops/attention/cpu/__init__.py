"""Attention on CPUs: SDPA kernels of torch, tables of distances for ALiBi, eager attention for the rest."""

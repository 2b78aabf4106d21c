"""Entries beside Megatron; nothing in this package imports megatron-core."""

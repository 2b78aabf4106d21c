"""Lowering of tiles to calls of a fused varlen operator, shared by the npu and cuda backends."""

"""Attention on NVIDIA GPUs: FlashAttention varlen calls, and a Triton tile kernel for what they do not accept."""

"""Attention on Ascend NPUs: npu_fusion_attention_v2."""

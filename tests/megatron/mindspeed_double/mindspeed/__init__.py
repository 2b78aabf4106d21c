"""Stands for MindSpeed (tests/megatron/mindspeed_double)."""

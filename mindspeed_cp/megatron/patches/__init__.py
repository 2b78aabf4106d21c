"""What a version of Megatron-core, or a device without CUDA, needs patched; undone on exit, never at import."""

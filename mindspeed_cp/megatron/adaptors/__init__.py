"""What a Megatron model uses: attention, positions, batches and loss that follow a plan."""

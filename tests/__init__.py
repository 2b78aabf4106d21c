"""The tests mirror the packages; a package themselves, so that tests/megatron cannot stand in for megatron."""

"""Fetches of keys and values: what each rank needs, by which routes it comes, in which steps, and the programs."""

"""What a plan looks like: summary, tables, tile map."""

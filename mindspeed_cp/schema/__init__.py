"""Building blocks of settings files: strict sections, number types, YAML with line numbers, one-line errors."""

"""Plans, simulations and runs as text, PNG, notebook and traces.  rich and matplotlib are imported where used."""

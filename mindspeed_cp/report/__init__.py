"""Plans, simulations and runs as text, PNG, HTML and traces.  rich and matplotlib are imported where they are used."""

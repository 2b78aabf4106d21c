"""Choice of the device, limits of NPUs, and errors of NPUs in one line."""

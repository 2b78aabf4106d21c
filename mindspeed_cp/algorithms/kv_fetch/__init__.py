"""KV fetch: every rank gets the keys and values that its tiles need from the ranks that own them."""

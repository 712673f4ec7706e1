"""KV cache bookkeeping in plain Python: `pages` (free lists), `prefix` (protocol, none), `radix` (tree). No torch."""

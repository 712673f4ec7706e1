"""Attention backends: `base` protocol and row layout | `reference` plain torch, the oracle | `select`."""

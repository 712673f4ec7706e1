"""Builds and connects: `loop` | `worker` (one rank) | `detokenizer` (service) | `frontend` (tokenize, submit, streams, cancel)."""

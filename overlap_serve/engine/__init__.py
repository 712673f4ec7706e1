"""Executes step plans: `base` protocol | `batch` (mirror of the persistent batch) | `engine` on torch | `fake` on numpy."""

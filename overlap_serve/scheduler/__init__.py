"""What runs next: `req` (state of a choice) | `policy` (order and bounds) | `scheduler` (handle, plan, apply). Plain Python."""

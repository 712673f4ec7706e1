"""What runs next, in plain Python: `scheduler` (handle, plan, apply) over `limits`, `req` (state of a choice), `policy` (shares and
margins), `room` (pages and slots) and `outputs`."""

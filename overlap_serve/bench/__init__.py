"""Measuring: load against a server over HTTP, and the parts of the system by themselves."""

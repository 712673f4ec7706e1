"""Where work runs: streams and events. `base` protocols | `thread`, `stepped` streams without torch | `cpu`, `cuda` devices."""

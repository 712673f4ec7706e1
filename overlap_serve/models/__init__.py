"""One decoder for all families: `tp` | `layers` | `decoder` | `families` (config readers, weight tables) | `weights` | `source`."""

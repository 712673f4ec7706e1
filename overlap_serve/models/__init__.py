"""One decoder for all families: `tp` | `layers` | `moe` | `decoder` | `families` (config readers, weight tables) | `weights` | `source`."""

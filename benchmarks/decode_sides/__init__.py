"""The sides of `cpu_decode`, each run as a process of its own: `overlap`, `transformers_generate` and `llama`, over `side`."""

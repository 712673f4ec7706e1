"""The OpenAI API as data: `protocol`, `tokenization` (requests) | `response`, `stream`, `logprobs`, `echo` (answers). No HTTP."""

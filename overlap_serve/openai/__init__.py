"""The OpenAI API as data: `protocol` (request and response models) | `stream` (TextDelta -> SSE chunks)."""

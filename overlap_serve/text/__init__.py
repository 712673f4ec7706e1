"""Text in and out, without torch: `tokenizer`, `template` (chat templates) | `detokenizer` (UTF-8 boundaries, stop strings)."""

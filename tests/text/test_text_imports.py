from __future__ import annotations

import subprocess
import sys


def test_text_and_the_detokenizer_service_load_no_torch_and_no_transformers() -> None:
    code = (
        "import sys\n"
        "import overlap_serve.text.tokenizer, overlap_serve.text.template, overlap_serve.text.detokenizer\n"
        "import overlap_serve.runtime.detokenizer\n"
        "from overlap_serve.text.template import fake_text\n"
        "fake_text()\n"
        "print(sorted({'torch', 'transformers', 'ray', 'fastapi', 'numpy'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]", done.stdout

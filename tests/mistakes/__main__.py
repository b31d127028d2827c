"""`python -m tests.mistakes`: writes docs/mistakes.md; with `--show WORD`, prints some."""

from __future__ import annotations

import sys

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")

from tests.mistakes.page import PAGE, page_text  # noqa: E402

if __name__ == "__main__":
    word = sys.argv[2] if sys.argv[1:2] == ["--show"] else None
    if word is None:
        PAGE.write_text(page_text(), encoding="utf-8")
        print(f"wrote {PAGE}")
    else:
        print(page_text(word))

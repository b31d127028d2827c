"""What transformers says of tiny models, recorded so that tests can ask without PyTorch.

    pip install -e '.[test,serving-test]' && python -m tests.serving.recorded

writes `recorded.npz` beside this file: for every model of `checkpoints.CONFIGS` the logits of
`PROMPT` at every position and the greedy continuations of `ROWS`, with the versions that gave them.
Weights are not in it. `write_checkpoint` draws them from a seeded generator, for transformers here
and for our own models in `test_recorded.py`; their sum shows whether both have had the same. The
seed is the first with which rounding decides no token of an answer.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from examples.llm_serving.random_checkpoint import save_random_checkpoint
from examples.llm_serving.tensor_files import find_arrays
from tests.serving.checkpoints import CONFIGS, SIZES, torch_greedy, torch_logits

FILE = Path(__file__).with_suffix(".npz")
PROMPT = [5, 17, 3, 80, 42, 8, 61]
ROWS = [[5, 17, 3, 80], [42, 8, 61, 7], [1, 2, 3, 4]]
NUM_NEW = 8
# By how much the likeliest token must lead, many times what our logits may differ by.
LEAST_LEAD = 0.02


def write_checkpoint(name: str, folder: Path, seed: int) -> float:
    """Write one of `CONFIGS` with its weights as Hugging Face would; returns the weights' sum."""
    values = SIZES | CONFIGS[name]
    save_random_checkpoint(folder, values["model_type"], seed, **values)
    return sum(float(array.map().sum(dtype=np.float64)) for array in find_arrays(folder).values())


def read_record(name: str) -> dict[str, np.ndarray]:
    """What is recorded of a model: `seed`, `weights` (their sum), `logits` and `greedy`."""
    with np.load(FILE) as stored:
        names = [key for key in stored if key.startswith(f"{name}/")]
        return {key.removeprefix(f"{name}/"): stored[key] for key in names}


def ask_transformers(name: str, folder: Path, seed: int) -> dict[str, Any]:
    """The same of transformers itself, and by how much the likeliest token leads (`lead`)."""
    import torch
    from transformers import AutoModelForCausalLM

    weights = write_checkpoint(name, folder, seed)
    model, loading = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    wrong = {what: names for what, names in loading.items() if names}
    assert not wrong, f"transformers does not read {name} as we write it: {wrong}"
    model = model.eval()
    answers = torch_greedy(model, ROWS, max_new_tokens=NUM_NEW, eos_token_id=-1, pad_token_id=0)
    leads = []
    for row in answers.tolist():
        logits = np.sort(torch_logits(model, row)[len(ROWS[0]) - 1 : -1], axis=-1)
        leads.append((logits[:, -1] - logits[:, -2]).min())
    return {
        "seed": seed,
        "weights": weights,
        "logits": torch_logits(model, PROMPT),
        "greedy": answers.astype(np.int32),
        "lead": min(leads),
    }


def main() -> None:
    import torch
    import transformers

    found: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__}
    for name in CONFIGS:
        for seed in itertools.count():
            with tempfile.TemporaryDirectory() as folder:
                answer = ask_transformers(name, Path(folder), seed)
            if answer["lead"] > LEAST_LEAD:
                break
        found |= {f"{name}/{what}": value for what, value in answer.items()}
    np.savez_compressed(FILE, **found)
    print(f"{FILE}: {FILE.stat().st_size} bytes of {', '.join(CONFIGS)}")


if __name__ == "__main__":
    main()

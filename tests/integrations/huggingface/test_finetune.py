"""examples/finetune_hf.py: the same losses on one rank and on four, exact resumption, a model that loads anywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

ROOT = Path(__file__).parents[3]
CHATS = [
    {"messages": [{"role": "user", "content": f"What is {i} plus {i}?"}, {"role": "assistant", "content": " ".join(["It is", str(2 * i)] * (1 + i * i % 31))}]}
    for i in range(40)
]  # fmt: skip


def finetune(out: Path, *arguments: str) -> list[str]:
    """Lines that the example prints."""
    (out.parent / "chats.jsonl").write_text("\n".join(map(json.dumps, CHATS)))
    command = [sys.executable, "examples/finetune_hf.py", "--out", str(out), "--data", str(out.parent / "chats.jsonl")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def losses(lines: list[str]) -> dict[int, float]:
    steps = [line.removeprefix("step ").split(": loss ") for line in lines if line.startswith("step ")]
    return {int(step): float(loss) for step, loss in steps}


SMALL = ("--documents", "8", "--tokens", "256", "--save-every", "2")


@pytest.mark.thorough
def test_ranks_and_restarts_do_not_change_a_run(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for name in ("one", "four"):
        (tmp_path / name).mkdir()
    alone = losses(finetune(tmp_path / "one" / "out", "--ranks", "1", "--cp", "1", "--steps", "4", *SMALL))
    out = tmp_path / "four" / "out"
    first = finetune(out, "--ranks", "4", "--cp", "2", "--steps", "2", *SMALL)
    second = finetune(out, "--ranks", "4", "--cp", "2", "--steps", "4", *SMALL)
    assert f"goes on after step 2 of {out}" in second
    together = losses(first) | losses(second)
    assert together.keys() == alone.keys() == {1, 2, 3, 4}
    assert all(together[step] == pytest.approx(alone[step], abs=1e-5) for step in alone)
    model, tokenizer = (kind.from_pretrained(out / "model") for kind in (AutoModelForCausalLM, AutoTokenizer))
    tokens = tokenizer("What is 3 plus 3?", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert torch.isfinite(model(input_ids=tokens).logits).all()
    assert model.config._attn_implementation == "sdpa"

"""examples/finetune_hf.py: the same losses on one rank and on four, exact resumption, a model that loads anywhere."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from mindspeed_cp import ConfigError
from tests.programs import run_programs

ROOT = Path(__file__).parents[3]
CHATS = [
    {"messages": [{"role": "user", "content": f"What is {i} plus {i}?"}, {"role": "assistant", "content": " ".join(["It is", str(2 * i)] * (1 + i * i % 31))}]}
    for i in range(40)
]  # fmt: skip


def example(_: list[str]) -> None:
    """The program; its ranks import it by its name."""
    sys.path.insert(0, str(ROOT / "examples"))
    import finetune_hf

    finetune_hf.main()


def started(*arguments: str) -> list[str]:
    """Lines that the example prints."""
    [done] = run_programs(example, arguments, [{"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}])
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def finetune(out: Path, *arguments: str) -> list[str]:
    """Lines that the example prints, with chats as its data."""
    data = written(out.parent / "chats.jsonl", CHATS)
    return started("--out", str(out), "--data", data, *arguments)


def written(path: Path, samples: list[dict]) -> str:
    path.write_text("\n".join(map(json.dumps, samples)))
    return str(path)


def losses(lines: list[str]) -> dict[int, float]:
    steps = [line.removeprefix("step ").split(": loss ") for line in lines if line.startswith("step ")]
    return {int(step): float(loss) for step, loss in steps}


SMALL = ("--documents", "8", "--tokens", "256", "--save-every", "2")


def test_replicas_share_the_pages_and_another_run_needs_another_folder(tmp_path: Path, monkeypatch) -> None:
    out = ("--out", str(tmp_path / "out"))
    lines = started(*out, "--ranks", "2", "--cp", "1", "--steps", "2", "--documents", "9", "--tokens", "1536")
    assert losses(lines).keys() == {1, 2}
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from finetune_hf import check_run

    begun = {"model": "llama", "documents": 9, "tokens": 1536, "lr": 3e-4, "seed": 1, "data": None, "out": tmp_path / "out"}  # fmt: skip
    check_run(Namespace(**begun))
    with pytest.raises(ConfigError, match=r"--model is qwen3, but .* holds a run with llama; valid: the same, or"):
        check_run(Namespace(**{**begun, "model": "qwen3"}))
    with pytest.raises(ConfigError, match=r"--data .*chats.jsonl has other samples than the run"):
        check_run(Namespace(**{**begun, "data": Path(written(tmp_path / "chats.jsonl", CHATS))}))


def test_every_family_can_be_trained(monkeypatch) -> None:
    from mindspeed_cp.integrations.huggingface import FAMILIES

    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from finetune_hf import MODELS

    assert MODELS.keys() == {name for name in FAMILIES if "_vl_" not in name}  # these have no model without pictures


def read(path: Path, text: str) -> list[dict]:
    """Samples of a file with a text."""
    from finetune_data import read_samples  # beside the example

    path.write_text(text)
    return read_samples(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [("", "has no line"), ("{", "line 1 is no JSON"), ('{"words": 1}', 'line 1 has neither "text" nor "messages"'),
     ('{"text": "a"}\n{"messages": [{"role": "user", "content": "x"}]}', "line 2 has no message of the assistant"),
     ('{"messages": [{"role": "tool", "content": "x"}]}', "role 'tool' .*; valid: .* system, user or assistant"),
     ('{"messages": [{"role": "user", "content": ["x"]}]}', "content of type list")],
)  # fmt: skip
def test_data_that_cannot_be_learned_is_refused(tmp_path, monkeypatch, text: str, says: str) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    with pytest.raises(ConfigError, match=says):
        read(tmp_path / "data.jsonl", text)


def test_any_text_of_json_is_read(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from finetune_data import tokenize, train_tokenizer

    text = '{"text": "a\u2028b"}\n{"text": ""}\n{"text": "c", "messages": null}\n{"text": "d", "messages": []}\n'
    samples = read(tmp_path / "data.jsonl", text)
    assert samples == [{"text": "a\u2028b"}, {"text": ""}, {"text": "c"}, {"text": "d"}]
    documents = tokenize(samples, train_tokenizer(samples), 64)
    assert len(documents) == 4 and all((labels != -100).all() for _, labels in documents)


def test_masks_hide_a_share_of_what_is_learned(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from finetune_data import with_masks

    ids, learned = np.arange(4000), np.arange(4000) % 2 == 0
    masked, labels = with_masks((ids, np.where(learned, ids, -100)), 7777, [1, 2, 3])
    hidden = masked == 7777
    assert (masked[~hidden] == ids[~hidden]).all() and (labels[hidden] == ids[hidden]).all()
    assert (labels[~hidden] == -100).all() and not (hidden & ~learned).any()
    assert 0.12 < hidden.sum() / learned.sum() < 0.18
    assert (with_masks((ids, labels), 7777, [1, 2, 4])[0] != masked).any()


def test_chats_of_a_template_without_marks_learn_what_the_assistant_says(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from finetune_data import tokenize, train_tokenizer

    tokenizer, messages = train_tokenizer(CHATS), 2 * CHATS[3]["messages"]
    [(ids, labels)] = tokenize([{"messages": messages}], tokenizer, 512)
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    [(other, learned)] = tokenize([{"messages": messages}], tokenizer, 512)
    assert (other == ids).all() and (learned == labels).all() and 0 < (labels != -100).sum() < len(ids)
    tokenizer.chat_template = "{% for m in messages %}{{ loop.length }}{{ m['content'] }}{% endfor %}"
    with pytest.raises(ConfigError, match="chat_template writes message 1 of a chat otherwise when others follow"):
        tokenize([{"messages": messages}], tokenizer, 512)


@pytest.mark.thorough
def test_a_pretrained_folder_is_trained(tmp_path: Path, monkeypatch) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from finetune_data import train_tokenizer

    tokenizer, folder = train_tokenizer(CHATS), tmp_path / "pretrained"
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    torch.manual_seed(11)
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=len(tokenizer)))
    model.model.embed_tokens.weight.data *= 30  # a first loss that no fresh weights have
    model.lm_head.weight.data *= 30
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    first = {}
    for ranks in ("1", "2"):
        (tmp_path / ranks).mkdir()
        run = ("--model", str(folder), "--steps", "1", *SMALL, "--ranks", ranks, "--cp", ranks)
        first[ranks] = losses(finetune(tmp_path / ranks / "out", *run))[1]
    assert first["1"] == pytest.approx(first["2"], abs=1e-5)
    assert first["1"] > 1.2 * np.log(len(tokenizer))


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["gemma2", "mixtral", "deepseek_v3", "modernbert", "gemma4_text"])
def test_every_kind_of_model_trains_the_same_on_more_ranks(tmp_path: Path, model: str) -> None:
    losses_of = {}
    for ranks in ("1", "3"):
        (tmp_path / ranks).mkdir()
        lines = finetune(
            tmp_path / ranks / "out", "--model", model, "--steps", "3", *SMALL, "--ranks", ranks, "--cp", ranks
        )
        losses_of[ranks] = losses(lines)
    assert losses_of["1"].keys() == {1, 2, 3}
    assert all(losses_of["3"][step] == pytest.approx(loss, abs=1e-5) for step, loss in losses_of["1"].items())


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

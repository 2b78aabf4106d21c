"""The data of finetune_hf.py: samples of a .jsonl file, a tokenizer trained on them, and documents of tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from mindspeed_cp import ConfigError

DOCS = Path(__file__).parents[1] / "docs"
CHAT = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|assistant|>{% generation %}{{ m['content'] }}<|end|>"
    "{% endgeneration %}{% else %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
)
SPECIAL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|mask|>"]
MASKED = 0.15  # share of the tokens that a model with a full mask has to find

#: Tokens and labels of a document, both [tokens].
Document = tuple[np.ndarray, np.ndarray]


def read_samples(path: Path | None) -> list[dict[str, Any]]:
    """Return the lines of a .jsonl file, or the paragraphs of docs/ under their headings."""
    if path is None:
        pages = [page.read_text("utf-8") for page in sorted(DOCS.glob("*.md"))]
        return [{"text": "## " + part} for page in pages for part in page.split("\n## ") if part.strip()]
    try:
        lines = path.read_text("utf-8").split("\n")  # a JSON string may hold other ends of lines
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--data {path} cannot be read ({error}); valid: a .jsonl file in UTF-8") from None
    samples = [_sample(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not samples:
        raise ConfigError(f"{path} has no line; valid: one JSON object a line")
    return samples


def _sample(path: Path, number: int, line: str) -> dict[str, Any]:
    """Return a line as a sample with a "text" or with "messages", of which at least one is learned."""
    where = f"{path}: line {number}"
    try:
        sample = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is no JSON ({error}); valid: one JSON object a line") from None
    if isinstance(sample, dict) and isinstance(sample.get("text"), str):
        return {"text": sample["text"]}
    messages = sample.get("messages") if isinstance(sample, dict) else None
    if not isinstance(messages, list):
        raise ConfigError(f'{where} has neither "text" nor "messages"; valid: one of them')
    for message in messages:
        role, content = (message.get(key) if isinstance(message, dict) else None for key in ("role", "content"))
        if role not in ("system", "user", "assistant") or not isinstance(content, str):
            raise ConfigError(
                f"{where} has a message of role {role!r} with a content of type {type(content).__name__}; valid: the "
                "role system, user or assistant, and a text"
            )
    if not any(message["role"] == "assistant" for message in messages):
        raise ConfigError(f"{where} has no message of the assistant, so nothing of it is learned; valid: at least one")
    return {"messages": messages}


def digest_of(samples: Sequence[dict[str, Any]]) -> str:
    """Return a digest of samples, which says whether a run goes on with the data that it began with."""
    return blake2b(json.dumps(samples, sort_keys=True).encode(), digest_size=8).hexdigest()


def train_tokenizer(samples: Sequence[dict[str, Any]]) -> PreTrainedTokenizerFast:
    """Train a byte-level byte-pair tokenizer on the samples."""
    from tokenizers import ByteLevelBPETokenizer

    texts = [
        sample["text"] if "text" in sample else "\n".join(m["content"] for m in sample["messages"])
        for sample in samples
    ]
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(texts, vocab_size=2048, special_tokens=SPECIAL, show_progress=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer, eos_token=SPECIAL[0], pad_token=SPECIAL[0], mask_token=SPECIAL[4]
    )
    tokenizer.chat_template = CHAT
    return tokenizer


def tokenize(samples: Sequence[dict[str, Any]], tokenizer: Any, tokens: int) -> list[Document]:
    """Return the token numbers and labels of every document; longer ones are cut into several."""
    documents = []
    for sample in samples:
        if "messages" in sample:
            ids, learned = _chat(sample["messages"], tokenizer)
        else:
            end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
            ids = np.array([*tokenizer(sample["text"])["input_ids"], *end])
            learned = np.ones(len(ids), bool)
        labels = np.where(learned, ids, -100)
        documents += [(ids[i : i + tokens], labels[i : i + tokens]) for i in range(0, len(ids), tokens)]
    return documents


def _chat(messages: Sequence[dict[str, str]], tokenizer: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of a chat and which are learned, those of the assistant, both [tokens]."""
    if tokenizer.chat_template is None:
        tokenizer.chat_template = CHAT
    if "generation %}" in tokenizer.chat_template:
        encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        return np.array(encoded["input_ids"]), np.array(encoded["assistant_masks"], bool)
    # Few templates of published models mark them: they are what a message adds behind its prompt.
    ids = np.array(tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"])
    learned = np.zeros(len(ids), bool)
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            parts = (messages[:i], True), (messages[: i + 1], False)
            start, stop = (
                tokenizer.apply_chat_template(part, return_dict=True, add_generation_prompt=prompts)["input_ids"]
                for part, prompts in parts
            )
            if start != ids[: len(start)].tolist() or stop != ids[: len(stop)].tolist():
                raise ConfigError(
                    f"the tokenizer's chat_template writes message {i} of a chat otherwise when others follow; valid: "
                    "one that only appends, or marks the assistant's tokens by {% generation %}"
                )
            learned[len(start) : len(stop)] = True
    return ids, learned


def documents_of_step(step: int, count: int, total: int, seed: int) -> np.ndarray:
    """Return the documents of a step: those of an epoch in random order, then those of the next."""
    numbers = np.arange(step * count, (step + 1) * count)
    orders = {
        epoch: np.random.default_rng([seed, epoch]).permutation(total) for epoch in set((numbers // total).tolist())
    }
    return np.array([orders[number // total][number % total] for number in numbers.tolist()])


def with_masks(document: Document, mask_token: int, seed: Sequence[int]) -> Document:
    """Return a document in which a share of its learned tokens is masked, and their labels alone."""
    ids, labels = document
    chosen = (labels != -100) & (np.random.default_rng(seed).random(len(ids)) < MASKED)
    return np.where(chosen, mask_token, ids), np.where(chosen, labels, -100)

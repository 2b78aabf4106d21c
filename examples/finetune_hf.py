"""Fine-tune a Hugging Face model on packed documents, with planned context parallelism and FSDP2.

::

    python examples/finetune_hf.py               # 4 local ranks on this CPU: 2 replicas x 2 context-parallel ranks
    python examples/finetune_hf.py --data chats.jsonl --model qwen3 --ranks 2 --cp 2
    torchrun --nproc-per-node 8 examples/finetune_hf.py --cp 8 --device cuda

A line of a .jsonl file has a "text", or "messages" with roles and contents, of which the assistant's are learned.
Without --data the pages of docs/ are the texts. A byte-pair tokenizer is trained on them, and the model starts from
random weights, so nothing is downloaded. Every step takes the same documents on any number of ranks. A run that is
started again with the same --out goes on where its last checkpoint is; the model at the end loads in plain
transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from mindspeed_cp import ConfigError, Documents, Topology
from mindspeed_cp.data.balance import assign
from mindspeed_cp.integrations import huggingface as cp

DOCS = Path(__file__).parents[1] / "docs"
BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}

_SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8}
_GQA = {**_SIZES, "num_key_value_heads": 4}
#: Small models by their model_type.
MODELS: dict[str, dict[str, Any]] = {
    "llama": _GQA,
    "mistral": {**_GQA, "sliding_window": 128},
    "qwen2": _GQA,
    "qwen3": {**_GQA, "head_dim": 16},
    "qwen3_moe": {**_GQA, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "gemma3_text": {**_GQA, "head_dim": 16, "sliding_window": 64},
    "deepseek_v3": {
        **_SIZES, "num_key_value_heads": 8, "moe_intermediate_size": 64, "n_routed_experts": 8, "n_group": 2,
        "topk_group": 1, "num_experts_per_tok": 2, "q_lora_rank": 48, "kv_lora_rank": 32, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 1,
    },
    "gpt2": {"n_embd": 128, "n_layer": 4, "n_head": 8, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "bloom": {"hidden_size": 128, "n_layer": 4, "n_head": 8},
}  # fmt: skip

CHAT = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|assistant|>{% generation %}{{ m['content'] }}<|end|>"
    "{% endgeneration %}{% else %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
)
SPECIAL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]


def read_arguments() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="llama", help="family of the random model (llama)")
    parser.add_argument("--data", type=Path, help=".jsonl of texts or chats (the pages of docs/)")
    parser.add_argument("--out", type=Path, default=Path("runs/finetune_hf"), help="folder of checkpoints and model")
    parser.add_argument("--ranks", type=int, default=4, help="local ranks, where torchrun did not start them (4)")
    parser.add_argument("--cp", type=int, default=2, help="context-parallel ranks of a replica (2)")
    parser.add_argument("--algorithm", default="hierarchical", help="algorithm of the plans (hierarchical)")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps (10)")
    parser.add_argument("--documents", type=int, default=24, help="documents of a step (24)")
    parser.add_argument(
        "--tokens", type=int, default=2048, help="most tokens of a packed row; longer texts are cut (2048)"
    )
    parser.add_argument("--save-every", type=int, default=5, help="steps between checkpoints (5)")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=BACKENDS, default="cpu")
    arguments = parser.parse_args()
    for name in ("ranks", "cp", "steps", "documents", "tokens", "save_every"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(arguments, name)}; valid: 1 or more")
    return arguments


def read_samples(path: Path | None) -> list[dict[str, Any]]:
    """Return the lines of a .jsonl file, or the paragraphs of docs/ under their headings."""
    if path is None:
        pages = [page.read_text("utf-8") for page in sorted(DOCS.glob("*.md"))]
        return [{"text": "## " + part} for page in pages for part in page.split("\n## ") if part.strip()]
    samples = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
    for number, sample in enumerate(samples, 1):
        if not isinstance(sample, dict) or not ("text" in sample or "messages" in sample):
            raise ConfigError(f'{path}: sample {number} has neither "text" nor "messages"; valid: one of them')
    if not samples:
        raise ConfigError(f"{path}: has no line; valid: one JSON object a line")
    return samples


def train_tokenizer(samples: list[dict[str, Any]]) -> PreTrainedTokenizerFast:
    """Train a byte-level byte-pair tokenizer on the samples."""
    from tokenizers import ByteLevelBPETokenizer

    texts = [sample.get("text") or "\n".join(m["content"] for m in sample["messages"]) for sample in samples]
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(texts, vocab_size=2048, special_tokens=SPECIAL, show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, eos_token=SPECIAL[0], pad_token=SPECIAL[0])
    tokenizer.chat_template = CHAT
    return tokenizer


def tokenize(samples: list[dict[str, Any]], tokenizer: Any, tokens: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the token numbers and labels of every document; longer ones are cut into several."""
    documents = []
    for sample in samples:
        if "messages" in sample:
            encoded = tokenizer.apply_chat_template(
                sample["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            ids, learned = np.array(encoded["input_ids"]), np.array(encoded["assistant_masks"], bool)
        else:
            ids = np.array([*tokenizer(sample["text"])["input_ids"], tokenizer.eos_token_id])
            learned = np.ones(len(ids), bool)
        labels = np.where(learned, ids, -100)
        documents += [(ids[i : i + tokens], labels[i : i + tokens]) for i in range(0, len(ids), tokens)]
    return documents


def documents_of_step(step: int, count: int, total: int, seed: int) -> np.ndarray:
    """Return the documents of a step: those of an epoch in random order, then those of the next."""
    numbers = np.arange(step * count, (step + 1) * count)
    orders = {
        epoch: np.random.default_rng([seed, epoch]).permutation(total) for epoch in set((numbers // total).tolist())
    }
    return np.array([orders[number // total][number % total] for number in numbers.tolist()])


class Trainer:
    """One rank of the training."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, world = arguments, dist.get_world_size()
        if world % arguments.cp:
            raise ConfigError(f"--cp {arguments.cp}; valid: a divisor of the number of ranks, which is {world}")
        local = int(os.environ.get("LOCAL_RANK", 0))
        self.device = torch.device(arguments.device if arguments.device == "cpu" else f"{arguments.device}:{local}")
        self.mesh = init_device_mesh(
            arguments.device, (world // arguments.cp, arguments.cp), mesh_dim_names=("dp", "cp")
        )
        self.topology = Topology.from_mesh(self.mesh["cp"])
        samples, folder = read_samples(arguments.data), arguments.out / "tokenizer"
        if dist.get_rank() == 0 and not folder.exists():
            train_tokenizer(samples).save_pretrained(folder)
        dist.barrier()
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        self.documents = tokenize(samples, self.tokenizer, arguments.tokens)
        self.step = 0
        self._make_model()

    def _make_model(self) -> None:
        cp.register()
        ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "vocab_size": len(self.tokenizer)}
        config = AutoConfig.for_model(self.arguments.model, **MODELS[self.arguments.model], **ids)
        if hasattr(config, "max_position_embeddings"):
            config.max_position_embeddings = max(self.arguments.tokens, 128)
        torch.manual_seed(self.arguments.seed)
        self.model = AutoModelForCausalLM.from_config(config, attn_implementation=cp.IMPLEMENTATION).to(self.device)
        over = self.mesh["dp", "cp"]._flatten("dp_cp")
        for module in self.model.modules():
            if type(module).__name__ in (self.model._no_split_modules or ()):
                fully_shard(module, mesh=over)
        fully_shard(self.model, mesh=over)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.arguments.lr, eps=1e-6)

    def batches(self) -> list[tuple[Documents, dict[str, torch.Tensor]]]:
        """Return the packed rows of this replica: the documents of the step, balanced over replicas."""
        numbers = documents_of_step(self.step, self.arguments.documents, len(self.documents), self.arguments.seed)
        lengths = np.array([len(self.documents[number][0]) for number in numbers])
        hidden = self.model.config.hidden_size
        # Work of a layer: 24 h^2 for each token in linear layers, 4 h for each pair in attention.
        assignment = assign(
            lengths, lambda n: 24.0 * hidden**2 * n + 2.0 * hidden * n * (n + 1.0), self.mesh["dp"].size(),
            token_bound=self.arguments.tokens, equal_counts=True,
        )  # fmt: skip
        rows = []
        for chosen in assignment.rows(self.mesh["dp"].get_local_rank()):
            ids, labels = (
                torch.from_numpy(np.concatenate([self.documents[number][i] for number in numbers[chosen]]))[None]
                for i in (0, 1)
            )
            rows.append(
                (Documents(lengths[chosen]), {"input_ids": ids.to(self.device), "labels": labels.to(self.device)})
            )
        return rows

    def train_step(self) -> float:
        """Run one optimizer step; return the mean loss over all labels of all ranks."""
        cut, rank, group = [], self.mesh["cp"].get_local_rank(), self.mesh["cp"].get_group()
        for documents, batch in self.batches():
            plans = cp.build_plans(self.model.config, documents, self.topology, self.arguments.algorithm)
            cut.append(cp.shard_batch(batch, plans, rank, group=group))
        labels = [batch.pop("shift_labels") for batch in cut]
        count, total = cp.count_labels(labels), torch.zeros((), device=self.device)
        for i, batch in enumerate(cut):
            self.model.set_requires_gradient_sync(i == len(cut) - 1)
            share = cp.loss(self.model(**batch).logits, labels[i], count)
            share.backward()
            total += share.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    def save(self) -> None:
        """Write a checkpoint of model, optimizer and step."""
        folder = self.arguments.out / "checkpoints" / f"step-{self.step}"
        model, optimizer = get_state_dict(self.model, self.optimizer)
        checkpoints.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        if dist.get_rank() == 0:
            latest = self.arguments.out / "latest"
            latest.with_suffix(".new").write_text(str(self.step))
            latest.with_suffix(".new").replace(latest)

    def load(self) -> bool:
        """Read the last checkpoint, if there is one."""
        latest = self.arguments.out / "latest"
        if not latest.exists():
            return False
        self.step = int(latest.read_text())
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer}
        checkpoints.load(state, checkpoint_id=self.arguments.out / "checkpoints" / f"step-{self.step}")
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return True

    def export(self) -> None:
        """Write the model and its tokenizer as plain transformers loads them."""
        weights = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            self.model.save_pretrained(self.arguments.out / "model", state_dict=weights)
            self.tokenizer.save_pretrained(self.arguments.out / "model")
        dist.barrier()


def run(arguments: argparse.Namespace) -> None:
    """Train on this rank."""
    dist.init_process_group(BACKENDS[arguments.device])
    trainer, is_first = Trainer(arguments), dist.get_rank() == 0
    if trainer.load() and is_first:
        print(f"goes on after step {trainer.step} of {arguments.out}", flush=True)
    while trainer.step < arguments.steps:
        loss = trainer.train_step()
        if is_first:
            print(f"step {trainer.step}: loss {loss:.6f}", flush=True)
        if trainer.step % arguments.save_every == 0 or trainer.step == arguments.steps:
            trainer.save()
    trainer.export()
    if is_first:
        print(f"model: {arguments.out / 'model'}", flush=True)
    dist.destroy_process_group()


def run_local_rank(rank: int, arguments: argparse.Namespace, port: int) -> None:
    """Train on one of the ranks that this program started."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": arguments.ranks, "LOCAL_WORLD_SIZE": arguments.ranks}
    os.environ.update({name: str(value) for name, value in places.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    run(arguments)


def main() -> None:
    """Train, on ranks of torchrun or on local ones that are started here."""
    arguments = read_arguments()
    if "RANK" in os.environ:
        return run(arguments)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(run_local_rank, (arguments, port), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()

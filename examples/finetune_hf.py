"""Fine-tune a Hugging Face model on packed documents, with planned context parallelism and FSDP2.

::

    python examples/finetune_hf.py               # 4 local ranks on this CPU: 2 replicas x 2 context-parallel ranks
    python examples/finetune_hf.py --data chats.jsonl --model qwen3 --ranks 2 --cp 2
    python examples/finetune_hf.py --data chats.jsonl --model /models/Qwen3-0.6B
    torchrun --nproc-per-node 8 examples/finetune_hf.py --cp 8 --device cuda

A line of a .jsonl file has a "text", or "messages" with roles and contents, of which the assistant's are learned.
Without --data the pages of docs/ are the texts. --model is a folder with pretrained weights and their tokenizer, or the
name of a family: then a byte-pair tokenizer is trained on the texts, and a small model starts from random weights, so
that nothing is downloaded. Models with a causal mask learn the next token, those with a full mask
(bert, modernbert, eurobert) the tokens that are masked. Every step takes the same documents on any number of ranks. A
run that is started again with the same --out goes on where its last checkpoint is; the model at the end loads in plain
transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
from finetune_data import digest_of, documents_of_step, read_samples, tokenize, train_tokenizer, with_masks
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from mindspeed_cp import ConfigError
from mindspeed_cp.data.balance import assign
from mindspeed_cp.integrations import huggingface as cp

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}

_SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8}
_GQA = {**_SIZES, "num_key_value_heads": 4, "head_dim": 16}
_LOCAL = {**_GQA, "sliding_window": 64}
_ROUTED = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}
_GROUPS = {**_ROUTED, "n_routed_experts": 8, "n_group": 2, "topk_group": 1}
_LATENT = {
    **_SIZES, **_GROUPS, "num_key_value_heads": 8, "q_lora_rank": 48, "kv_lora_rank": 32, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
RUN = "run.json"  # in the folder of a run: what it was started with

#: Families whose small models need no more than sizes and grouped queries.
_PLAIN = ("llama", "qwen2", "qwen3", "gemma", "glm", "glm4", "phi", "olmo", "olmo2", "smollm3", "cohere", "granite",
          "ernie4_5", "hunyuan_v1_dense", "apertus", "arcee", "helium", "eurobert")  # fmt: skip

#: Those that have a sliding window as well, in some or all layers.
_WITH_WINDOW = ("mistral", "phi3", "starcoder2", "ministral", "ministral3", "cohere2", "olmo3", "exaone4", "cwm",
                "gemma3_text")  # fmt: skip

#: Small models by their model_type.
MODELS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(_PLAIN, _GQA),
    **dict.fromkeys(_WITH_WINDOW, _LOCAL),
    "mixtral": {**_GQA, "num_local_experts": 4},
    "qwen2_moe": {**_GQA, **_ROUTED, "num_experts": 8, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {**_GQA, **_ROUTED, "num_experts": 8},
    "gpt_oss": {**_GQA, "sliding_window": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {**_GQA, "sliding_window": 64, "attn_logit_softcapping": None},
    "gemma4_text": {**_GQA, "global_head_dim": 32, "sliding_window": 64, "hidden_size_per_layer_input": 0},
    "deepseek_v2": _LATENT,
    "deepseek_v3": {**_LATENT, "first_k_dense_replace": 1},
    "glm4_moe_lite": _LATENT,
    "youtu": _LATENT,
    "minicpm3": _LATENT,
    "glm4_moe": {**_GQA, **_GROUPS},
    "olmoe": {**_GQA, "num_experts": 8, "num_experts_per_tok": 2},
    "granitemoe": {**_GQA, "num_local_experts": 4},
    "seed_oss": {**_GQA, "attention_dropout": 0.0, "residual_dropout": 0.0},
    "ernie4_5_moe": {**_GQA, "moe_intermediate_size": 64, "moe_k": 2, "moe_num_experts": 8},
    "minimax_m2": {**_GQA, "rotary_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    "hunyuan_v1_moe": {**_GQA, "num_experts": 4, "moe_topk": 2},
    "dots1": {**_GQA, **_GROUPS, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "afmoe": {**_LOCAL, **_ROUTED, "num_experts": 8},
    "exaone_moe": {**_LOCAL, **_ROUTED, "num_experts": 8},
    "hy_v3": {**_GQA, **_ROUTED, "num_experts": 8},
    "solar_open": {**_GQA, **_GROUPS},
    "gpt_neox": _SIZES,
    "gpt2": {"n_embd": 128, "n_layer": 4, "n_head": 8, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "bert": {**_SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "modernbert": {**_SIZES, "local_attention": 64},
}  # fmt: skip


def read_arguments() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model", default="llama", help="folder of save_pretrained, or family of a small random model (llama)"
    )
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
    if arguments.model not in MODELS and not (Path(arguments.model) / "config.json").exists():
        parser.error(
            f"--model {arguments.model}; valid: a folder with config.json, weights and tokenizer, or a family, one of "
            f"{', '.join(MODELS)}"
        )
    ranks = int(os.environ.get("WORLD_SIZE", arguments.ranks))
    if ranks % arguments.cp:
        parser.error(f"--cp {arguments.cp}; valid: a divisor of the number of ranks, which is {ranks}")
    if arguments.documents < ranks // arguments.cp:
        parser.error(f"--documents {arguments.documents}; valid: {ranks // arguments.cp} or more, one for each replica")
    return arguments


def check_run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what says which run this is: its model, data and steps, not how many ranks share the work.

    Raises:
        ConfigError: the data cannot be read, or the folder of --out holds a run of others.
    """
    run = {name: getattr(arguments, name) for name in ("model", "documents", "tokens", "lr", "seed")}
    digest = digest_of(read_samples(arguments.data))
    path = arguments.out / RUN
    begun = read_run(path) if path.exists() else run | {"digest": digest}
    for name, value in run.items():
        if begun.get(name) != value:
            raise ConfigError(
                f"--{name} is {value}, but {arguments.out} holds a run with {begun.get(name)}; valid: the same, or "
                "another --out"
            )
    if begun.get("digest") != digest:
        raise ConfigError(
            f"--data {arguments.data or '(the pages of docs/)'} has other samples than the run in {arguments.out} "
            "began with; valid: the same, or another --out"
        )
    return run | {"digest": digest}


def read_run(path: Path) -> dict[str, Any]:
    """Return what a run was started with."""
    try:
        return dict(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); valid: another --out") from None


class Trainer:
    """One rank of the training."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, world = arguments, dist.get_world_size()
        local = int(os.environ.get("LOCAL_RANK", 0))
        self.device = torch.device(arguments.device if arguments.device == "cpu" else f"{arguments.device}:{local}")
        self.mesh = init_device_mesh(
            arguments.device, (world // arguments.cp, arguments.cp), mesh_dim_names=("dp", "cp")
        )
        run, samples, folder = check_run(arguments), read_samples(arguments.data), arguments.out / "tokenizer"
        dist.barrier()  # all have read what the first rank may write now
        if dist.get_rank() == 0 and not (arguments.out / RUN).exists():
            is_random = arguments.model in MODELS
            tokenizer = train_tokenizer(samples) if is_random else AutoTokenizer.from_pretrained(arguments.model)
            tokenizer.save_pretrained(folder)
            new = arguments.out / f"{RUN}.new"
            new.write_text(json.dumps(run, indent=1), "utf-8")
            new.replace(arguments.out / RUN)
        dist.barrier()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.documents = tokenize(samples, self.tokenizer, arguments.tokens)
        self.step = 0
        self._make_model()

    def _make_model(self) -> None:
        name, attention = self.arguments.model, cp.register()
        torch.manual_seed(self.arguments.seed)
        if name in MODELS:
            ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "vocab_size": len(self.tokenizer)}
            config = AutoConfig.for_model(name, **MODELS[name], **ids)
            if hasattr(config, "max_position_embeddings"):
                config.max_position_embeddings = max(self.arguments.tokens, 128)
        else:
            config = AutoConfig.from_pretrained(name)
        self.has_full_mask = cp.attention_config(config, 0).mask == "full"
        kind = AutoModelForMaskedLM if self.has_full_mask else AutoModelForCausalLM
        if name in MODELS:
            model = kind.from_config(config, attn_implementation=attention)
        else:
            model = kind.from_pretrained(name, attn_implementation=attention, dtype=torch.float32)
        self.model = model.train().to(self.device)
        over = self.mesh["dp", "cp"]._flatten("dp_cp")
        tied = self.model.get_input_embeddings()  # weights that the head may share stay with the whole model
        for module in self.model.modules():
            if type(module).__name__ in (self.model._no_split_modules or ()) and tied not in module.modules():
                fully_shard(module, mesh=over)
        fully_shard(self.model, mesh=over)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.arguments.lr, eps=1e-6)

    def batches(self) -> list[dict[str, torch.Tensor]]:
        """Return the packed rows of this replica: the documents of the step, balanced over replicas."""
        numbers = documents_of_step(self.step, self.arguments.documents, len(self.documents), self.arguments.seed)
        documents = [self.documents[number] for number in numbers]
        if self.has_full_mask:
            mask, seed = self.tokenizer.mask_token_id, [self.arguments.seed, self.step]
            documents = [with_masks(document, mask, [*seed, i]) for i, document in enumerate(documents)]
        lengths = np.array([len(ids) for ids, _ in documents])
        hidden = self.model.config.hidden_size
        # Work of a layer: 24 h^2 for each token in linear layers, 4 h for each pair in attention.
        assignment = assign(
            lengths, lambda n: 24.0 * hidden**2 * n + 2.0 * hidden * n * (n + 1.0), self.mesh["dp"].size(),
            token_bound=self.arguments.tokens, equal_counts=True,
        )  # fmt: skip
        rows = []
        for chosen in assignment.micro_batches[self.mesh["dp"].get_local_rank()]:
            ids, labels = (np.concatenate([documents[i][part] for i in chosen])[None] for part in (0, 1))
            row = {"input_ids": ids, "labels": labels, "cu_seq_lens_q": np.cumsum([0, *lengths[chosen]])}
            rows.append({name: torch.from_numpy(value).to(self.device) for name, value in row.items()})
        return rows

    def train_step(self) -> float:
        """Run one optimizer step; return the mean loss over all labels of all ranks."""
        config, algorithm = self.model.config, self.arguments.algorithm
        cut = [cp.planned_batch(batch, config, self.mesh["cp"], algorithm) for batch in self.batches()]
        count, total = cp.count_labels([labels for _, labels in cut]), torch.zeros((), device=self.device)
        for i, (rows, labels) in enumerate(cut):
            self.model.set_requires_gradient_sync(i == len(cut) - 1)
            share = cp.loss(self.model(**rows).logits, labels, count)
            share.backward()
            total += share.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return cp.global_loss(total)

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


def open_local_store() -> dist.TCPStore:
    """Return the store by which local ranks meet. It listens on a free port before any rank starts, so that no other
    program can take the port, and for this machine alone."""
    listener = socket.create_server(("127.0.0.1", 0))
    address, port = listener.getsockname()
    return dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=False
    )


def take_local_rank(rank: int, ranks: int, port: int) -> None:
    """Set the environment of one of the ranks that this program starts, as torchrun does: the store is its parent's."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in places.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    torch.set_num_threads(1)


def run_local_rank(rank: int, arguments: argparse.Namespace, port: int) -> None:
    """Train on one of the ranks that this program started."""
    take_local_rank(rank, arguments.ranks, port)
    run(arguments)


def main() -> None:
    """Train, on ranks of torchrun or on local ones that are started here."""
    arguments = read_arguments()
    try:
        check_run(arguments)
    except ConfigError as error:
        sys.exit(f"finetune_hf.py: {error}")
    if "RANK" in os.environ:
        return run(arguments)
    store = open_local_store()
    torch.multiprocessing.spawn(run_local_rank, (arguments, store.port), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()

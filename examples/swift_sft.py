"""Train with ms-swift's own trainer over planned context-parallel ranks, here on CPUs (pip install ms-swift==4.6.0).

::

    python examples/swift_sft.py                        # 4 local ranks: 2 replicas x 2 context-parallel ranks
    python examples/swift_sft.py --ranks 3 --cp 3       # any number of ranks, whatever the number of heads
    python examples/swift_sft.py --ranks 1 --cp 1       # one rank, without plans: transformers' own attention

The losses and gradient norms of all three are the same: a step takes the same samples. The model is a small random
Qwen3, the tokenizer is trained on the pages of docs/. With ms-swift's command line, a file with the two statements of
:func:`use_plans` goes to ``--external_plugins``.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import torch

DOCS = Path(__file__).parents[1] / "docs"
STEPS, ROWS = 4, 4


def use_plans() -> None:
    """Cut rows and attend by plans."""
    from mindspeed_cp.integrations import ms_swift

    ms_swift.use_plans(algorithm="hierarchical")


def make_model(folder: Path) -> None:
    """Write a small random Qwen3 with 4 query and 2 kv heads, its tokenizer, and samples."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    texts = [part for page in sorted(DOCS.glob("*.md")) for part in page.read_text("utf-8").split("\n## ")]
    trained = ByteLevelBPETokenizer()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trained.train_from_iterator(texts, vocab_size=512, special_tokens=special, show_progress=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=2048, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    lines = [
        {
            "messages": [
                {"role": "user", "content": text[:40]},
                {"role": "assistant", "content": text[: 90 + 37 * i % 500]},
            ]
        }
        for i, text in enumerate(texts[:200])
    ]
    (folder / "samples.jsonl").write_text("\n".join(map(json.dumps, lines)), "utf-8")


def train(rank: int, arguments: argparse.Namespace, port: int, folder: str) -> None:
    """Train on one rank."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": arguments.ranks, "LOCAL_WORLD_SIZE": arguments.ranks}
    os.environ.update({name: str(value) for name, value in places.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), SWIFT_PATCH_CONV3D="0")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    from swift import SftArguments, sft_main

    class ArgumentsOnCpu(SftArguments):
        """ms-swift packs rows under flash attention alone, which CPUs lack; give attn_impl="flash_attn" elsewhere."""

        def _check_padding_free(self) -> None:
            pass

    if arguments.cp > 1:
        use_plans()
    settings: dict[str, Any] = {
        "model": folder, "model_type": "qwen3", "template": "qwen3", "dataset": [f"{folder}/samples.jsonl"],
        "output_dir": f"{folder}/out", "tuner_type": "full", "torch_dtype": "float32", "attn_impl": "sdpa",
        "sequence_parallel_size": arguments.cp, "padding_free": True,
        "per_device_train_batch_size": ROWS // (arguments.ranks // arguments.cp), "gradient_accumulation_steps": 1,
        "max_steps": STEPS, "max_length": 512, "learning_rate": 1e-2, "lr_scheduler_type": "constant",
        "logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True, "ddp_backend": "gloo",
        "split_dataset_ratio": 0.0, "dataset_shuffle": False, "train_dataloader_shuffle": False,
        "dataset_num_proc": 1, "dataloader_num_workers": 0, "load_from_cache_file": False, "check_model": False,
        "gradient_checkpointing": True, "bf16": False, "fp16": False,
    }  # fmt: skip
    result = sft_main(ArgumentsOnCpu(**settings))
    if rank == 0:
        for entry in result["log_history"]:
            if "loss" in entry:
                print(json.dumps({"loss": float(entry["loss"]), "grad_norm": float(entry["grad_norm"])}), flush=True)


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="local ranks (4)")
    parser.add_argument("--cp", type=int, default=2, help="context-parallel ranks of a replica (2)")
    arguments = parser.parse_args()
    if arguments.cp < 1 or arguments.ranks % arguments.cp or ROWS % (arguments.ranks // arguments.cp):
        parser.error(f"--ranks {arguments.ranks} --cp {arguments.cp}; valid: 1, 2 or 4 replicas of --cp ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        torch.multiprocessing.spawn(train, (arguments, port, folder), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()

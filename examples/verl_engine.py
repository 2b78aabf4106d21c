"""Train with verl's own FSDP2 engine over planned context-parallel ranks, here on CPUs (pip install verl==0.9.1).

::

    python examples/verl_engine.py                        # 4 local ranks: 2 replicas x 2 context-parallel ranks
    python examples/verl_engine.py --ranks 3 --cp 3       # verl's own Ulysses needs a divisor of the 4 heads
    python examples/verl_engine.py --ranks 1 --cp 1       # the same steps on one rank

The losses and gradient norms of all three are the same. In a job of verl, a file with the two lines of
:func:`register` is what ``actor_rollout_ref.model.external_lib`` names; verl has no platform for CPUs, so this example
brings one.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

STEPS, ROLLOUTS, TOKENS = 3, 8, 97  # TOKENS: of the longest rollout


def register() -> None:
    """Make planned engines those of verl."""
    from mindspeed_cp.integrations.verl import register_engines

    register_engines(algorithm="hierarchical")


def use_cpu() -> None:
    """Give verl a platform without an accelerator."""
    from verl.plugin.platform import platform_manager
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    class PlatformCPU(PlatformCUDA):
        """CPUs of one machine, over gloo."""

        device_name, vendor_name, device_module = "cpu", "cpu", torch.cpu  # type: ignore[assignment]

        def is_available(self) -> bool:
            return True

        def current_device(self) -> Any:
            return "cpu"

        def device_count(self) -> int:
            return 1

        def synchronize(self, device_index: int | None = None) -> None:
            pass

        def empty_cache(self) -> None:
            pass

        def communication_backend_name(self) -> str:
            return "gloo"

    platform_manager.set_platform(PlatformCPU())


def make_model(folder: str) -> None:
    """Write a small random Qwen3 with 4 query and 2 kv heads."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)


def make_engine(folder: str, ranks: int) -> Any:
    """Return verl's engine for the model, over context-parallel ranks."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    engine = EngineRegistry.new(
        model_type="language_model",
        backend="fsdp2",
        model_config=HFModelConfig(
            path=folder, load_tokenizer=False, override_config={"attn_implementation": "sdpa"}, use_remove_padding=True
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            ulysses_sequence_parallel_size=ranks,
            mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
            use_torch_compile=False,
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-2, total_training_steps=STEPS, clip_grad=1.0),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def rollouts(step: int, replica: int, replicas: int) -> Any:
    """Return the rollouts of a replica in a step: prompts and answers of unequal lengths, packed without padding."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    generator = torch.Generator().manual_seed(100 + step)
    lengths = torch.randint(3, TOKENS, (ROLLOUTS,), generator=generator).tolist()
    tokens = [torch.randint(0, 128, (length,), generator=generator) for length in lengths]
    own = slice(replica * ROLLOUTS // replicas, (replica + 1) * ROLLOUTS // replicas)

    def packed(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(rows[own], layout=torch.jagged)

    data = TensorDict(
        {
            "input_ids": packed(tokens),
            "position_ids": packed([torch.arange(length) for length in lengths]),
            "loss_mask": packed([(torch.arange(length) >= length // 3).long() for length in lengths]),
        },
        batch_size=ROLLOUTS // replicas,
    )
    settings = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 3 * TOKENS, "temperature": 1.0}
    tu.assign_non_tensor(data, use_remove_padding=True, **settings)
    return data


def train(rank: int, arguments: argparse.Namespace, port: int, folder: str) -> None:
    """Train on one rank."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(arguments.ranks))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    use_cpu()
    register()
    from verl.workers.utils.losses import sft_loss

    dist.init_process_group("gloo")
    engine = make_engine(folder, arguments.cp)
    replica, replicas = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
    for step in range(STEPS):
        data = rollouts(step, replica, replicas)
        with engine.train_mode():
            outputs = engine.train_batch(data, partial(sft_loss, None))
        loss = torch.tensor(float(sum(outputs["loss"])) / replicas)
        dist.all_reduce(loss)
        if rank == 0:
            mean = float(loss) * replicas / arguments.ranks
            print(
                json.dumps({"step": step + 1, "loss": mean, "grad_norm": outputs["metrics"]["grad_norm"]}), flush=True
            )
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="local ranks (4)")
    parser.add_argument("--cp", type=int, default=2, help="context-parallel ranks of a replica (2)")
    arguments = parser.parse_args()
    if arguments.cp < 1 or arguments.ranks % arguments.cp or ROLLOUTS % (arguments.ranks // arguments.cp):
        parser.error(f"--ranks {arguments.ranks} --cp {arguments.cp}; valid: 1, 2, 4 or 8 replicas of --cp ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        make_model(str(Path(folder)))
        torch.multiprocessing.spawn(train, (arguments, port, folder), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()

"""Latents of multi-head latent attention: how a reader expands them to keys and values of its heads.

A token has one latent and some channels of k that all heads share (rotary positions). With the up-projection U of a
head, split into the rows for k and those for v (DeepSeek-V2, 2405.04434, equations 9 to 15)::

    k = [U_k latent, shared]          v = U_v latent

So a rank can send the latent and the shared channels, and every reader computes k and v of its heads. In the backward
it computes them again, and from their gradients, summed over its queries, its part of three sums::

    dlatent = sum over heads of U_k^T dk_content + U_v^T dv      dshared = sum over heads of dk_shared
    dU = sum over rows of [dk_content, dv] latent^T

The first two return to the owner of the row, where those of all readers are added in fp32; dU of a rank is that of the
rows that it read, and is added up over ranks as for any parameter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_cp.errors import ConfigError
from mindspeed_cp.plan.problem import AttentionConfig


def checked_up_projection(
    kv_up: object, attention: AttentionConfig, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Check the weight of the up-projection of keys and values.

    Args:
        kv_up: [heads * (content + head_dim_v), latent channels], head by head the rows of k without its shared channels
            and then those of v, as Megatron and Hugging Face store it.
        attention: of the layer on this tensor-parallel rank, with latents.
        dtype, device: those of q.

    Raises:
        ConfigError: it is no tensor, or has another shape, type or device.
    """
    assert attention.latent is not None
    latent, shared = attention.latent
    rows = attention.heads * (attention.head_dim - shared + attention.head_dim_v)
    if not isinstance(kv_up, Tensor):
        raise ConfigError(
            f"kv_up is a {type(kv_up).__name__}; valid for a plan whose attention has latents: the weight of the "
            f"up-projection of keys and values, a tensor [{rows}, {latent}]"
        )
    if tuple(kv_up.shape) != (rows, latent):
        raise ConfigError(
            f"kv_up has shape {list(kv_up.shape)}; valid: [{rows}, {latent}], for each of {attention.heads} heads the "
            f"{attention.head_dim - shared} rows of k and the {attention.head_dim_v} of v"
        )
    if kv_up.dtype != dtype or kv_up.device != device:
        raise ConfigError(f"kv_up is {kv_up.dtype} on {kv_up.device}, q is {dtype} on {device}; they must agree")
    return kv_up


class LatentExpansion:
    """Expansion of latents to the keys and values of some heads, and its gradient.

    Args:
        kv_up: weight of the up-projection for all heads of this tensor-parallel rank, see `checked_up_projection`.
        attention: attention of the layer, with latents.
        heads: (first, last + 1) of the heads to expand.
    """

    def __init__(self, kv_up: Tensor, attention: AttentionConfig, heads: tuple[int, int]) -> None:
        assert attention.latent is not None
        self._width, self._width_v = attention.head_dim, attention.head_dim_v
        self._content = attention.head_dim - attention.latent[1]
        self._heads = heads[1] - heads[0]
        rows = self._content + self._width_v
        self._rows = slice(heads[0] * rows, heads[1] * rows)
        self._up = kv_up.detach()[self._rows]
        self._split: tuple[Tensor, Tensor] | None = None

    def expand(self, shared: Tensor, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys [rows, heads, head_dim] and values [rows, heads, head_dim_v] of the type of the latents.

        Args:
            shared: channels of k that all heads share, [rows, 1, channels].
            latent: [rows, 1, channels].
        """
        if self._split is None:  # a copy of the weight, so that values come out in one run
            by_head = self._up.unflatten(0, (self._heads, -1))
            content, values = by_head.split([self._content, self._width_v], 1)
            self._split = content.flatten(0, 1), values.flatten(0, 1)
        up_k, up_v = self._split
        count, flat = len(latent), latent[:, 0]
        k = latent.new_empty(count, self._heads, self._width)
        k[..., : self._content] = (flat @ up_k.t()).view(count, self._heads, self._content)
        k[..., self._content :] = shared
        return k, (flat @ up_v.t()).view(count, self._heads, self._width_v)

    def gradient(self, dk: Tensor, dv: Tensor, latent: Tensor, dkv_up: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of rows from those of their keys and values, and add the weight's.

        Args:
            dk, dv: fp32, of the shapes that `expand` returns.
            latent: [rows, 1, channels].
            dkv_up: gradient of the weight, fp32 of its shape for all heads; added to in place.

        Returns:
            dshared fp32 and dlatent, [rows, 1, channels]: sums over these heads.
        """
        dkv = torch.cat([dk[..., : self._content], dv], 2).flatten(1)
        dkv_up[self._rows] += multiply(dkv.t(), latent[:, 0])
        return dk[..., self._content :].sum(1, keepdim=True), multiply(dkv, self._up)[:, None]


def multiply(x: Tensor, y: Tensor) -> Tensor:
    """Multiply a matrix in fp32 by one of the type of q, for a sum of such products over slots and ranks.

    CPUs multiply in fp32. Other devices have fast products of 16-bit types alone: x is rounded to the type of y, as the
    gradient of k and v is before a linear layer, and so is the product, except on CUDA, which returns it in fp32 from
    torch 2.8 on.
    """
    if y.dtype == torch.float32 or x.device.type == "cpu":
        return x @ y.float()
    if x.device.type == "cuda" and torch.__version__ >= "2.8":
        return torch.mm(x.to(y.dtype), y, out_dtype=torch.float32)
    return x.to(y.dtype) @ y

"""Ordinary aten operators on "npu" tensors: computed on the CPU, over the same memory.

`install` replaces in the dispatcher every aten kernel of torch_npu that a CPU can compute. A replaced operator waits for
the current stream, sees its arguments as CPU tensors over the same memory, computes, and puts new results into npu memory;
so within a stream the order of operators is kept, and other streams stay asynchronous. As this is below autograd and inside the
dispatcher, it also serves calls from torch_npu's C++ code and from the threads of the backward.

Asynchronous, like on a device, are copies: between npu tensors of one device, type and memory layout, from pinned memory and
back with non_blocking=True. Random numbers come from torch_npu's generators: seed and offset decide, and states can be kept.

With HOST_CANN_LATE=1 results come late, as on a device: see `late.c` and README.md.

torch_npu's own autograd formulas for aten operators call operator kernels past the dispatcher; they are replaced by PyTorch's.
Untouched: allocation, views, storages and the fused AdamW (KEEP), and all operators of torch_npu itself, whose kernels are in
libopapi.
"""

from __future__ import annotations

import collections
import ctypes
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.host_cann import device_memory, task_queue
from tests.host_cann.device_memory import copied, copy_bytes, drain, fill_bytes, host, late, poison, put, tensors, watch

KEEP = frozenset(
    [
        "_copy_from_and_resize",
        "_fused_adamw_",  # of which torch_npu makes calls of aclnnApplyAdamWV2
        "_lazy_clone",
        "_pin_memory",
        "_reshape_alias",
        "as_strided",
        "as_strided_",
        "copy_memory_",
        "empty",
        "empty_like",
        "empty_strided",
        "empty_with_format",
        "empty_with_swapped_memory",
        "get_npu_format",
        "get_storage_size",
        "is_pinned",
        "is_set_to",
        "new_empty_strided",
        "record_stream",
        "resize_",
        "resize_as_",
        "set_",
        "unsafe_empty_with_format",
        "view",
        "view_as_complex",
        "view_as_real",
    ]
)

ALLOCATE = ("empty.memory_format", "empty_strided")  # kept, but poisoned if wanted

calls: collections.Counter[str] = collections.Counter()  # operator -> calls that were served here, for tests
_library: torch.library.Library | None = None


# Before torch 2.9 there is no torch.library.get_kernel: a kernel is called through its operator there, which finds it anew in
# each call. That does for all kernels but those that are replaced themselves.
HAS_KERNELS = hasattr(torch.library, "get_kernel")
_OVERRIDES = (
    {"allow_override": True} if "allow_override" in inspect.signature(torch.library.Library.impl).parameters else {}
)


def kernel_of(operator: torch._ops.OpOverload, key: str) -> Callable[..., Any]:
    """What a key has for an operator, as a function of the keys of the call and its arguments."""
    if HAS_KERNELS:
        return torch.library.get_kernel(operator, key).call_boxed
    dispatch_key = torch._C._parse_dispatch_key(key)

    def call(keyset: Any, *arguments: Any, **options: Any) -> Any:
        return operator._op_dk(dispatch_key, *arguments, **options)

    return call


def replace(library: torch.library.Library, name: str, function: Callable[..., Any], key: str, **options: Any) -> None:
    """Put a function in place of the kernel that an operator of aten has for a key."""
    library.impl(name.removeprefix("aten::"), function, key, **_OVERRIDES, **options)


def install(acl: ctypes.CDLL) -> int:
    """Replaces the kernels, once; returns how many. `acl` is libascendcl of the stand-in."""
    global _library
    if _library is not None:
        return 0
    device_memory.declare(acl)
    _library = torch.library.Library("aten", "IMPL")
    special: dict[str, Callable[..., Any]] = {"aten::copy_": _copy_kernel(), "aten::contiguous": _contiguous}
    composed = ("aten::_to_copy", "aten::clone")  # of empty and copy_, by PyTorch
    replaced = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch says each time that a kernel is overridden
        for name in ALLOCATE if HAS_KERNELS else ():
            replace(_library, name, _allocation_kernel(f"aten::{name}"), "PrivateUse1", with_keyset=True)
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1"):
            operator = _operator(name)
            if operator is None or not (name in special or name in composed or _computable(name, operator)):
                continue
            if name in composed:
                function = kernel_of(operator, "CPU") if HAS_KERNELS else _copy_of
            else:
                function = special.get(name) or _kernel(operator)
            keyset = name in composed or name == "aten::copy_"
            replace(_library, name, function, "PrivateUse1", with_keyset=keyset)
            replaced += 1
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutogradPrivateUse1"):
            operator = _operator(name)
            if operator is None or name == "aten::contiguous":
                continue
            if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
                replace(_library, name, operator.decompose, "AutogradPrivateUse1")
            elif torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CPU"):
                replace(_library, name, kernel_of(operator, "AutogradCPU"), "AutogradPrivateUse1", with_keyset=True)
            else:
                continue
            replaced += 1
    return replaced


def _operator(name: str) -> torch._ops.OpOverload | None:
    """The aten operator of this name, unless it is one of torch_npu's own or one that is kept."""
    packet, _, overload = name.removeprefix("aten::").partition(".")
    if not name.startswith("aten::") or "npu_" in name or packet in KEEP or not hasattr(torch.ops.aten, packet):
        return None
    return getattr(getattr(torch.ops.aten, packet), overload or "default", None)


def _computable(name: str, operator: torch._ops.OpOverload) -> bool:
    view = any(result.alias_info and not result.alias_info.is_write for result in operator._schema.returns)
    return not view and torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CPU")


# --- arguments and results ----------------------------------------------------------------------------------------------


def _to_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return host(value) if value.device.type == "npu" else value
    if isinstance(value, (list, tuple)):
        return type(value)(_to_host(item) for item in value)
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "npu" else value
    if isinstance(value, torch.Generator):
        return None if value.device.type == "npu" else value
    return value


def _to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            return value
        value = value.detach().resolve_conj().resolve_neg()
        result = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        put(result, value)
        return result
    if isinstance(value, (list, tuple)):
        return type(value)(_to_device(item, device) for item in value)
    return value


def _device_of(values: Any) -> torch.device | None:
    """The npu device that arguments name, or on which their tensors are."""
    for value in values:
        if isinstance(value, torch.Tensor):
            value = value.device
        if isinstance(value, torch.device) and value.type == "npu":
            return value
        if isinstance(value, (list, tuple)) and (device := _device_of(value)) is not None:
            return device
    return None


# --- random numbers -----------------------------------------------------------------------------------------------------


def _random(operator: torch._ops.OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in operator.tags


@contextmanager
def _randomness(device: torch.device, given: torch.Generator | None) -> Iterator[None]:
    """PyTorch's CPU generator goes on from the state of an npu generator for a while; the npu generator moves on by one draw."""
    generator = given if given is not None else torch.npu.default_generators[device.index]
    offset = generator.get_offset()
    generator.set_offset(offset + 4)  # torch_npu moves in fours
    kept = torch.default_generator.get_state()
    torch.default_generator.manual_seed((generator.initial_seed() * 0x9E3779B97F4A7C15 + offset) % 2**63)
    try:
        yield
    finally:
        torch.default_generator.set_state(kept)


# --- kernels ------------------------------------------------------------------------------------------------------------


def _kernel(operator: torch._ops.OpOverload) -> Callable[..., Any]:
    """What runs for `operator` on npu tensors: the same on the CPU."""
    schema = operator._schema
    names = [argument.name for argument in schema.arguments]
    written = [a for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    outs = [argument.name for argument in written if argument.kwarg_only]
    # The argument that each result is, if it is one.
    sources = [
        next((a.name for a in written if r.alias_info and r.alias_info.before_set & a.alias_info.before_set), None)
        for r in schema.returns
    ]
    random = _random(operator)

    def kernel(*arguments: Any, **options: Any) -> Any:
        calls[schema.name] += 1
        given = dict(zip(names, arguments, strict=False), **options)
        device = _device_of(given.values()) or torch.device("npu")
        if device.index is None:
            device = torch.device("npu", torch.npu.current_device())
        drain(device, schema.name)
        on_cpu = {name: _to_host(value) for name, value in given.items()}
        delayed = late() and bool(schema.returns or written)
        changed = [argument.name for argument in written if delayed and given.get(argument.name) is not None]
        if delayed:
            watch(schema.name, device, list(tensors([value for name, value in given.items() if name not in outs])))
            on_cpu.update({name: copied(on_cpu[name]) for name in changed})
        for name in outs:  # an empty one may have to grow
            if isinstance(given[name], torch.Tensor) and given[name].numel() == 0:
                on_cpu[name] = torch.empty(0, dtype=given[name].dtype)
        positional = [on_cpu[name] for name in names[: len(arguments)]]
        by_name = {name: on_cpu[name] for name in options}
        generator = given.get("generator")
        if random and (generator is None or generator.device.type == "npu"):
            with _randomness(device, generator):
                result = operator(*positional, **by_name)
        else:
            result = operator(*positional, **by_name)
        for name in outs:
            if isinstance(given[name], torch.Tensor) and given[name].shape != on_cpu[name].shape:
                given[name].resize_(on_cpu[name].shape)
                if not delayed:
                    host(given[name]).copy_(on_cpu[name])
        for name in changed:
            is_tensor = isinstance(given[name], torch.Tensor)
            for target, value in zip(
                [given[name]] if is_tensor else given[name], [on_cpu[name]] if is_tensor else on_cpu[name], strict=True
            ):
                put(target, value)
        if not schema.returns:
            return None
        results = result if len(schema.returns) > 1 else (result,)
        results = tuple(
            given[source] if source else _to_device(value, device)
            for source, value in zip(sources, results, strict=True)
        )
        return results if len(results) > 1 else results[0]

    return kernel


def _copy_kernel() -> Callable[..., torch.Tensor]:
    """copy_: what a stream can copy as bytes is left to the stream; the rest waits for the current stream and is done at once."""
    if HAS_KERNELS:
        between = torch.library.get_kernel("aten::copy_", "PrivateUse1").call_boxed
    else:
        between = _copy_between

    def copy(keyset: Any, self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        task_queue.release_lock_in_waits()
        calls["aten::copy_"] += 1
        if self.numel() == 0:
            return self
        bytes_alone = self.dtype == source.dtype and self.shape == source.shape and _dense_alike(self, source)
        if bytes_alone and self.device == source.device:
            copy_bytes(self, source)
            return self
        if bytes_alone and "cpu" in (self.device.type, source.device.type):
            return between(keyset, self, source, non_blocking)
        for tensor in (self, source):
            if tensor.device.type == "npu":
                drain(tensor.device, "aten::copy_")
        value = _to_host(source)
        if self.device.type == "cpu":
            self.copy_(value)
            return self
        if late() and source.device.type == "npu":
            watch("aten::copy_", self.device, list(tensors(source)))
        put(self, value.to(self.dtype).expand(self.shape))
        return self

    return copy


def _copy_of(
    keyset: Any, self: torch.Tensor, *, dtype: Any = None, layout: Any = None, device: Any = None,
    pin_memory: bool | None = None, non_blocking: bool = False, memory_format: torch.memory_format | None = None,
) -> torch.Tensor:  # fmt: skip
    """_to_copy and clone, of empty and copy_."""
    where = {"dtype": dtype or self.dtype, "device": device or self.device, "pin_memory": bool(pin_memory)}
    keeps_strides = memory_format in (None, torch.preserve_format) and _is_dense(self)
    strides = self.stride() if keeps_strides else torch.empty(self.shape, device="meta").stride()
    return torch.empty_strided(self.shape, strides, **where).copy_(self, non_blocking)


def _is_dense(x: torch.Tensor) -> bool:
    return bool(torch._prims_common.is_non_overlapping_and_dense(x))


def _copy_between(keyset: Any, self: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
    """As torch_npu copies between host and device, for versions of torch whose kernels cannot be kept."""
    copy_bytes(self, source)
    if not non_blocking:
        drain((self if self.device.type == "npu" else source).device, "aten::copy_")
    return self


def _allocation_kernel(name: str) -> Callable[..., torch.Tensor]:
    """torch_npu's own allocation. With HOST_CANN_POISON=1 its memory is NaN, also where the caching allocator uses it again."""
    original = torch.library.get_kernel(name, "PrivateUse1")

    def allocate(keyset: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        task_queue.release_lock_in_waits()
        result = original.call_boxed(keyset, *arguments, **options)
        if poison():
            fill_bytes(result, 0xFF)
        return result

    return allocate


def _dense_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    lazy = a.is_conj() or b.is_conj() or a.is_neg() or b.is_neg()
    return not lazy and a.is_contiguous() and b.is_contiguous()


def _contiguous(self: torch.Tensor, *, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
    return self if self.is_contiguous(memory_format=memory_format) else self.clone(memory_format=memory_format)

"""Every private symbol of torch that the engine uses, each with its reason."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as _module

make_wrapper = torch.Tensor._make_wrapper_subclass
"""A tensor with shape and dtype but no memory. The only way to make one from Python."""

without_functions = torch._C.DisableTorchFunctionSubclass
"""Calls torch functions on a subclass as they are; the public way needs a function of one's own."""

dispatch_modes = torch._C._len_torch_dispatch_stack
"""Whether somebody watches operators (FlopCounterMode, fake tensors): there is no public question."""

_function_modes = torch._C._len_torch_function_stack
functorch_active = torch._C._are_functorch_transforms_active
tracing_state = torch._C._get_tracing_state
_function_mode_stack: Any = torch.overrides._get_current_function_mode_stack
_dispatch_mode_stack: Any = torch.utils._python_dispatch._get_current_dispatch_mode_stack
_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks


def use_count(tensor: Tensor) -> int:
    """How many hold a tensor: 1 if only its Python object does. C++ code that holds it too has linked to
    its place in the graph, which must then stay. (``torch.utils.swap_tensors`` asks the same.)"""
    with without_functions():
        return int(tensor._use_count())  # type: ignore[attr-defined]


def swap(tensor: Tensor, other: Tensor) -> None:
    """Let ``tensor``'s Python object be what ``other``'s is, and the other way round. What
    ``torch.utils.swap_tensors`` does, but attributes stay where they are and weak references, which are to
    the object and not to what it is, are no obstacle."""
    kind = type(tensor)
    tensor.__class__, other.__class__ = type(other), kind
    try:
        torch._C._swap_tensor_impl(tensor, other)
    except RuntimeError:  # C++ code has a weak reference to it
        tensor.__class__, other.__class__ = kind, type(tensor)
        raise


def unswap(wrapper: Tensor, tensor: Tensor) -> None:
    """Take back the swap of an ordinary tensor, now ``tensor``, with a wrapper without memory. Nothing
    happens to what has been taken back before an interrupt. Called :data:`without_functions`."""
    if wrapper.data_ptr() == 0:
        torch._C._swap_tensor_impl(wrapper, tensor)
    kind = type(wrapper)
    if kind is not Tensor:
        tensor.__class__, wrapper.__class__ = kind, Tensor


def watched() -> bool:
    """Whether somebody looks at, or changes, what each operation is or saves: then nothing is recorded.
    Called for every node, so only what can begin in the middle of a model is looked at."""
    return bool(
        _hooks(False) is not None  # activation checkpointing
        or dispatch_modes()
        or functorch_active()
        or forward_ad._current_level >= 0
    )


def watched_from_outside() -> bool:
    """The same at the call of a model, with what lasts for all of it."""
    return bool(
        watched()
        or _function_modes()
        or tracing_state() is not None
        or _module._has_any_global_hook()
    )


def watchers(outside: bool) -> list[str]:
    """What :func:`watched`, or :func:`watched_from_outside`, answers yes to, in words."""
    found = {
        "saved-tensor hooks are active (activation checkpointing, save_on_cpu)": _hooks(False),
        f"a dispatch mode is active ({_names(_dispatch_mode_stack())})": dispatch_modes(),
        "a functorch transform is active (vmap, grad, jvp)": functorch_active(),
        "forward-mode differentiation is active": forward_ad._current_level >= 0,
    }
    if outside:
        found |= {
            f"a function mode is active ({_names(_function_mode_stack())})": _function_modes(),
            "torch.jit.trace is active": tracing_state(),
            "hooks on all modules are registered (register_module_forward_hook and the like)": (
                _module._has_any_global_hook()
            ),
        }
    return [words for words, there in found.items() if there]


def _names(modes: list[Any]) -> str:
    return ", ".join(type(mode).__name__ for mode in modes)


def backward_hooks(model: nn.Module) -> list[dict[int, Any]]:
    """Where the backward hooks of all parts of a model are kept, so that asking for them is cheap."""
    return [
        hooks
        for part in model.modules()
        for hooks in (part._backward_hooks, part._backward_pre_hooks)
    ]


_nothing = nullcontext()


@contextmanager
def _modes(grad: bool, inference: bool, hooks: Any) -> Iterator[None]:
    if hooks is not None:
        _pop_hooks()
    try:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            yield
    finally:
        if hooks is not None:
            _push_hooks(*hooks)


def modes(grad: bool, inference: bool) -> Any:
    """The modes at the time of recording: without saved-tensor hooks, with gradients or not."""
    hooks = _hooks(False)
    same = torch.is_grad_enabled() is grad and torch.is_inference_mode_enabled() is inference
    return _nothing if same and hooks is None else _modes(grad, inference, hooks)


_clean = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


def as_called_from_python() -> Any:
    """Operators called inside behave as outside of all operators: inside ``__torch_dispatch__`` autograd is
    switched off below the gradient mode, so that what runs there would have no place in the graph."""
    return torch._C._ForceDispatchKeyGuard(*_clean)


uncompiled: Any = torch._disable_dynamo  # type: ignore[attr-defined]
"""Makes ``torch.compile`` run a function as it is. The public decorator imports the compiler at once; this
one does when the function is called, so ask :func:`compiler_loaded` first."""


def compiler_loaded() -> bool:
    return "torch._dynamo" in sys.modules


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` runs a module."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    wrapped = compiler is not None and isinstance(module, compiler.OptimizedModule)
    return wrapped or module._compiled_call_impl is not None


def caller() -> Any:
    """The frame that called the caller of this. It says whether a call is still running where an
    interrupt has kept the forward hooks from running."""
    return sys._getframe(2)


def finished(frame: Any) -> bool:
    """Whether a frame has been left; its variables are let go then."""
    try:
        frame.clear()
    except RuntimeError:  # it is executing
        return False
    return True


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply(*args)`` without what torch looks at first for functorch, if that is not active."""
    if functorch_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]

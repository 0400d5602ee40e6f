"""Where in the user's code something happens, and why the engine stopped there, in words."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import resolve_name

import rewire
from rewire.engine import private
from rewire.engine.lazy import HANDLERS, LazyTensor
from rewire.engine.observe import Why
from rewire.engine.parse.base import dtype_of, may_read, shape_of
from rewire.engine.scope import Scope
from rewire.ops import native
from rewire.ops.precision import input_dtype
from rewire.ops.sharding import has_fsdp

_TORCH = os.path.dirname(torch.__file__) + os.sep
_REWIRE = os.path.dirname(rewire.__file__) + os.sep
_MODELS = tuple(os.path.join(_REWIRE, *path, "") for path in (("models",), ("bench", "zoo")))
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_PACKAGES = sysconfig.get_path("purelib") + os.sep
_FUNCTIONS = os.path.join(_TORCH, "autograd", "function.py")
_COMPILER = os.path.join(_TORCH, "_dynamo", "eval_frame.py")


@dataclass(frozen=True)
class Place:
    """A place in the code of a model.

    Attributes:
        file, line: of the innermost call outside of torch and Rewire; empty and 0 if there is none, as in
            an ``nn.Sequential`` of torch's own modules.
        module: qualified name of the innermost module that is being called, empty for the model itself.
        kind: class of that module.
    """

    file: str = ""
    line: int = 0
    module: str = ""
    kind: str = ""

    @property
    def location(self) -> str:
        """``file:line``; the file relative to the working directory or to where packages are installed."""
        if not self.file:
            return ""
        for directory in (os.getcwd() + os.sep, _PACKAGES):
            if self.file.startswith(directory):
                return f"{self.file[len(directory) :]}:{self.line}"
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Found:
    """A place, and what of torch is between it and the engine."""

    place: Place
    hook: str = ""  # "forward hook" or "forward pre-hook" of the module
    function: str = ""  # the innermost autograd.Function whose forward is running
    compiled: bool = False  # whether compiled code runs


def find(names: Mapping[nn.Module, str], until: Any, hooks: bool = False) -> Found:
    """Where the caller is called from. Looking keeps no lazy tensor alive, except with ``hooks``.

    Args:
        names: qualified names of the model's modules.
        until: code object of the function that calls the model.
        hooks: whether to look for forward hooks.
    """
    user: Any = None
    module: nn.Module | None = None
    hook, function, compiled = "", "", False
    child, frame = None, cast(FrameType | None, sys._getframe(1))
    while frame is not None and frame.f_code is not until:
        code = frame.f_code
        if code is _CALL:
            # Reading locals keeps what they are now until the frame ends; these do not change.
            called = frame.f_locals["self"]
            module = called if module is None and called in names else module
        elif code.co_name == "inner" and code.co_filename == _CALL.co_filename:
            if hooks and module is None and child is not None and _is_user(child.co_filename):
                hook = hook or _hook(frame.f_locals.get("self"), child)
        elif code.co_name == "apply" and code.co_filename == _FUNCTIONS:
            function = function or frame.f_locals["cls"].__name__
        elif code.co_name == "compile_wrapper" and code.co_filename == _COMPILER:
            compiled = True
        if user is None and _is_user(code.co_filename):
            user = frame.f_code.co_filename, frame.f_lineno
        child, frame = code, frame.f_back
    file, line = user or ("", 0)
    name, kind = ("", "") if module is None else (names[module], type(module).__name__)
    return Found(Place(file, line, name, kind), hook, function, compiled)


_CALL = nn.Module._wrapped_call_impl.__code__


def _is_user(file: str) -> bool:
    if file.startswith((_TORCH, "<frozen ")):
        return False
    if file.startswith(_REWIRE):
        return file.startswith(_MODELS)
    return not file.startswith(_STANDARD) or file.startswith(_PACKAGES)


def _hook(module: Any, code: Any) -> str:
    """What kind of hook of a module runs this code; empty if none does."""
    if module is not None:
        for kind, hooks in (
            ("forward pre-hook", module._forward_pre_hooks),
            ("forward hook", module._forward_hooks),
        ):
            if any(_code(hook) is code for hook in hooks.values()):
                return kind
    return ""


def _code(function: Callable[..., Any]) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    if not hasattr(function, "__code__"):
        function = type(function).__call__
    return getattr(function, "__code__", None)


# Reasons


_READS = {
    F.scaled_dot_product_attention: "attention is computed by itself",
    **dict.fromkeys((Tensor.__repr__, Tensor.__format__, Tensor.__str__), "a value is printed"),
    **dict.fromkeys(
        (Tensor.register_hook, Tensor.retain_grad, Tensor.register_post_accumulate_grad_hook),
        "a value is given a hook for its gradient",
    ),
    **dict.fromkeys(
        (
            *(Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__bool__),
            *(Tensor.__float__, Tensor.__int__, Tensor.__index__, Tensor.data_ptr),
            *(Tensor.__deepcopy__, Tensor.__reduce_ex__, Tensor.__contains__, Tensor.cpu),
        ),
        "a value is read by Python code",
    ),
}


def why_run(why: Any, found: Found, scope: Scope | None, held: bool) -> str:
    """Why a region runs before the model returns.

    Args:
        why: what :meth:`rewire.engine.region.Region.run` received.
        found: where.
        scope: the call that is running.
        held: whether C++ code holds a value of the region.
    """
    if isinstance(why, str):
        return why
    if why is Why.MODE:
        by = f" by autograd.Function {found.function}" if found.function else ""
        return f"{changed_mode(scope)}{by}" if scope is not None else why.value
    if isinstance(why, Why):
        return _WHY.get(why, why.value)
    if found.compiled:
        return "code that torch.compile has compiled reads a value"
    if why is None:
        return "its values are wanted"
    function, args, kwargs = why if isinstance(why, tuple) else (why, (), {})
    name = name_of(function)
    if found.hook:
        return f"a {found.hook} on {_named(found.place)} reads a value ({name})"
    if held and found.function:
        return f"a value is held by C++ code: autograd.Function {found.function} reads it ({name})"
    if not isinstance(why, tuple):
        return f"a value is held by C++ code: {name} is called past Python (torch.jit.script, an extension)"
    if function in _READS:
        return f"{_READS[function]} ({name})"
    if function not in HANDLERS and private.watched():
        return f"{name} is called while {'; '.join(private.watchers(False))}"
    if function not in HANDLERS:
        return f"{name} is not known to the engine"
    reason = not_recording(scope, {})
    if reason is not None:
        return f"{name} is not recorded: {reason}"
    return f"{name} is not known to the engine with these arguments: {_arguments(args, kwargs)}"


_WHY = {
    Why.DTYPE: "a layer of another dtype follows",
    Why.AGAIN: "a batch norm is called again: it needs the running statistics of its first call",
    Why.STATISTICS: "running statistics that a recorded batch norm will update are needed",
    Why.OFF: "rewire.use_engine was called",
    Why.OTHER: "what was recorded in another gradient mode, or in another thread, reads it",
}


def why_alone(
    layer: Any, x: Any, why: str | None, scope: Scope | None, off: Mapping[Scope, str]
) -> str:
    """Why a layer runs by itself."""
    reason = why or not_recording(scope, off)
    if reason is not None:
        return reason
    values = layer.values
    if not native.available():
        return "the compiled kernels are missing"
    if not values.is_cpu:
        return f"there are no kernels for {values.device.type}"
    if native.kernels(values) is None:
        return (
            f"dtype {_dtype(values.dtype)} has no kernels: use bfloat16 (model.bfloat16()), float32 "
            "(model.float()) or float64"
        )
    if isinstance(x, Tensor) and type(x) not in (Tensor, nn.Parameter, LazyTensor):
        return f"its input is a {type(x).__name__}, not a plain tensor"
    if isinstance(x, Tensor) and input_dtype(dtype_of(x), "cpu") not in native.KERNEL_DTYPES:
        return (
            f"autocast is to {_dtype(input_dtype(dtype_of(x), 'cpu'))}, and the engine records float32, "
            "bfloat16 and float64"
        )
    if isinstance(x, Tensor) and not may_read(input_dtype(dtype_of(x), "cpu"), values.dtype):
        return f"its input is {_dtype(dtype_of(x))}, its values are {_dtype(values.dtype)}"
    return "the engine cannot read one of its tensors"


def not_recording(scope: Scope | None, off: Mapping[Scope, str]) -> str | None:
    """Why nothing at all is recorded now; None if something would be."""
    if scope is None:
        return "it is called outside of every module for which the engine is on"
    if not scope.on:
        return off.get(scope, "the engine is off")
    if not scope.fits():
        return changed_mode(scope)
    return "; ".join(private.watchers(False)) if private.watched() else None


def why_off(module: nn.Module, names: Mapping[nn.Module, str]) -> str:
    """Why nothing is recorded in a call of a module."""
    hooked = [
        names.get(part, "")
        for part in module.modules()
        if part._backward_hooks or part._backward_pre_hooks
    ]
    reasons = private.watchers(True)
    if hooked:
        rest = f" and {len(hooked) - 1} more" if len(hooked) > 1 else ""
        reasons.append(f"backward hook on module {hooked[0] or '(model)'}{rest}")
    if has_fsdp(module):
        reasons.append("FSDP frees parameters as soon as a part has run")
    return f"{'; '.join(reasons)}: layers run one by one"


def changed_mode(scope: Scope) -> str:
    """How gradient mode differs from that of the call."""
    if torch.is_inference_mode_enabled() is not scope.inference:
        now = "on" if torch.is_inference_mode_enabled() else "off"
        return f"gradient mode changed: inference mode is {now} here, unlike at the model's call"
    now = "on" if torch.is_grad_enabled() else "off"
    return f"gradient mode changed: gradients are {now} here, unlike at the model's call"


def name_of(function: Any) -> str:
    """A torch function as people write it."""
    if isinstance(function, torch._ops.OpOverload):
        return str(function)
    name: str = resolve_name(function) or getattr(function, "__name__", repr(function))
    name = name.removesuffix(".__get__").replace("torch.functional.", "torch.")
    return name.replace("torch.Tensor.", "Tensor.").replace("torch.nn.functional.", "F.")


def _named(place: Place) -> str:
    return place.module or "the model"


def _arguments(args: Any, kwargs: Any) -> str:
    parts = [_short(part) for part in args]
    return ", ".join([*parts, *(f"{key}={_short(part)}" for key, part in kwargs.items())])


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{_dtype(dtype_of(value))} {'x'.join(map(str, shape_of(value))) or 'scalar'}"
    if isinstance(value, slice):
        start, stop, step = (
            "" if n is None else _short(n) for n in (value.start, value.stop, value.step)
        )
        return f"{start}:{stop}" + (f":{step}" if step else "")
    if isinstance(value, tuple | list):
        inside = ", ".join(map(_short, value))
        return f"({inside})" if isinstance(value, tuple) else f"[{inside}]"
    text = repr(value)
    return text if len(text) <= 40 else text[:39] + "…"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

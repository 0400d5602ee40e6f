"""When anything is recorded: inside the call of a converted model, while nobody watches."""

from __future__ import annotations

import sys
import threading
import weakref
from typing import Any

import torch
from torch import nn

from rewire.engine import observe, private
from rewire.engine.graph import numbers
from rewire.engine.observe import Why
from rewire.engine.region import Region
from rewire.ops.sharding import has_fsdp


class Scope:
    """The call of a converted model.

    Attributes:
        on: whether anything is recorded in it.
        grad, inference: the modes in which it is; in another one, things are computed at once.
        modules: those whose calls are running, outermost first.
        region: what is being recorded.
        frame: of the outermost call.
        error: the exception that was being handled when it began.
        outer: the call in another mode that this one is inside of.
    """

    def __init__(self, on: bool, frame: Any, outer: Scope | None) -> None:
        self.on, self.frame, self.outer = on, frame, outer
        self.grad, self.inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.error = sys.exc_info()[1]
        self.modules: list[nn.Module] = []
        self.region: Region | None = None

    def fits(self) -> bool:
        """Whether the modes are its own now."""
        return (
            torch.is_grad_enabled() is self.grad
            and torch.is_inference_mode_enabled() is self.inference
        )

    def interrupted(self) -> bool:
        """Whether the call has ended in a way that no hook has seen."""
        return self.frame is not None and private.finished(self.frame)


class _Local(threading.local):
    scope: Scope | None = None


_local = _Local()
_hooks: weakref.WeakKeyDictionary[nn.Module, list[dict[int, Any]]] = weakref.WeakKeyDictionary()


def active() -> bool:
    """Whether the engine is on for a model that is being called on this thread."""
    return _local.scope is not None


def recording(dtype: torch.dtype) -> Region | None:
    """The region to record into on this thread, for values of a type; None where things are computed
    at once. One region has values of float32 and of bfloat16."""
    if torch.compiler.is_compiling():
        return None
    scope = _local.scope
    if scope is None or not scope.on or not scope.fits() or private.watched():
        return None
    region, dtype = scope.region, numbers(dtype)
    if region is None or region.closed or region.dtype is not dtype:
        if region is not None:
            region.run(Why.DTYPE)
        make = Region if observe.observer is None else observe.observer.region
        region = scope.region = make(dtype, scope.grad, scope.inference, scope.interrupted)
    return region


def enter(module: nn.Module, args: Any) -> None:
    """Forward pre-hook of every module with sparse layers in it."""
    if torch.compiler.is_compiling():
        return
    scope = _current()
    if scope is not None:
        if not scope.on or scope.fits():
            scope.modules.append(module)
            return
        if scope.region is not None:  # batch norms keep their order
            scope.region.run(Why.MODE)
    on = not (private.watched_from_outside() or any(_hooks_of(module)) or has_fsdp(module))
    _local.scope = scope = Scope(on, private.caller(), scope)
    scope.modules.append(module)
    if not on and observe.observer is not None:
        observe.observer.off(scope, module)


def leave(module: nn.Module, args: Any, output: Any) -> None:
    """Forward hook of the same modules, called even if there was an exception."""
    scope = _local.scope
    if torch.compiler.is_compiling() or scope is None or module not in scope.modules:
        return
    modules, failed = scope.modules, sys.exc_info()[1] is not scope.error
    while modules.pop() is not module:  # the calls inside were interrupted
        pass
    # If the module has called itself, and was interrupted there, it is in the list more than once.
    outermost = not modules or private.caller() is scope.frame or (failed and scope.interrupted())
    if not outermost:
        return
    _local.scope, scope.frame = scope.outer, None
    region, scope.region = scope.region, None
    if region is not None and (not failed or (region.written and not region.closed)):
        region.run(Why.RETURNED)


def stop() -> None:
    """Compute what is recorded on this thread, and record no more in the calls that are running: their
    hooks are taken away."""
    scope = _current()
    while scope is not None:
        if scope.region is not None and not scope.region.closed:
            scope.region.run(Why.OFF)
        scope.on, scope = False, scope.outer


def _current() -> Scope | None:
    """The innermost call on this thread that is running; those that were interrupted are forgotten."""
    scope = _local.scope
    while scope is not None and scope.interrupted():
        scope = _local.scope = scope.outer
    return scope


def _hooks_of(module: nn.Module) -> list[dict[int, Any]]:
    """Where backward hooks of a module's parts would be. Looked up once: a part that is added later is
    run as well, but with the gradients of the shadow graph."""
    found = _hooks.get(module)
    if found is None:
        found = _hooks[module] = private.backward_hooks(module)
    return found

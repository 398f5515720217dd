"""What is found out on first use, and kept: the same, whoever comes first."""

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

Result = TypeVar("Result")


class Once(Generic[Result]):
    """Results by key, each found once, in a thread of its own.

    torch keeps its modes per thread: hooks on saved tensors (gradient checkpointing counts them), inference mode,
    autocast, transforms, fake tensors, a default device. So none of the caller's modes reaches what is found, and
    tensors in it serve any later caller.
    """

    def __init__(self) -> None:
        self._found, self._lock = dict[Hashable, Result](), threading.Lock()

    def get(self, key: Hashable, find: Callable[[], Result], device: torch.device | None = None) -> Result:
        """Return the result of a key; `find` is called if there is none, on the caller's stream of a device."""
        if key in self._found:
            return self._found[key]
        if torch._C._current_graph_task_id() >= 0:
            # In a backward pass, as under reentrant checkpointing: torch has one thread for the backward passes of a
            # GPU, which is this one, so that another thread would wait for it forever.
            with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                return self._keep(key, find())
        with self._lock:
            if key not in self._found:
                stream = torch.cuda.current_stream(device) if device is not None and device.type == "cuda" else None

                def run() -> Result:
                    with torch.cuda.stream(stream):  # None does nothing
                        return find()

                with ThreadPoolExecutor(1) as pool:
                    self._keep(key, pool.submit(run).result())
            return self._found[key]

    def _keep(self, key: Hashable, result: Result) -> Result:
        self._found[key] = result
        return result

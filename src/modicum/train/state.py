"""What a run needs to go on exactly where it stood, taken out of its parts and put back into them.

Random states are restored, never seeded again. All of it is tensors and JSON.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from modicum.store import UserError

VERSION = 2
KEYS = {
    "step", "totals", "identity", "choices", "data", "best", "tokens", "seconds", "window", "spikes",
}  # fmt: skip


def random_names(states: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """A rank's states under the names that they have in a checkpoint: the first rank's are those of one process."""
    return {f"{name}.{rank}" if rank else name: state for name, state in states.items()}


def random_states(device: str) -> dict[str, Tensor]:
    """The states of PyTorch's generators, uint8: the CPU's, and the device's own."""
    states = {"rng.cpu": torch.get_rng_state()}
    if device == "cuda":
        states["rng.cuda"] = torch.cuda.get_rng_state()
    elif device == "mps":
        states["rng.mps"] = torch.mps.get_rng_state()
    return states


def restore_random_states(tensors: Mapping[str, Tensor], device: str, origin: object, rank: int = 0) -> None:
    """Put the generators back. A device or a rank that the run did not have before has no state, and keeps its own."""
    if "rng.cpu" not in tensors:
        raise UserError(f"{origin}: rng.cpu: missing; take another checkpoint")
    suffix = f".{rank}" if rank else ""
    cpu, own = tensors.get(f"rng.cpu{suffix}"), tensors.get(f"rng.{device}{suffix}")
    if cpu is not None:
        torch.set_rng_state(cpu.clone())
    if device == "cuda" and own is not None:
        torch.cuda.set_rng_state(own.clone())
    elif device == "mps" and own is not None:
        torch.mps.set_rng_state(own.clone())


def check_identity(before: Mapping[str, Any], now: Mapping[str, Any], origin: object) -> None:
    """Raise UserError when what identifies the run has changed, with every changed field's old and new value."""
    old, new = _flat(before), _flat(now)
    changed = [name for name in sorted(old.keys() | new.keys()) if old.get(name, _NONE) != new.get(name, _NONE)]
    if changed:
        lines = [f"  {name}: was {_said(old, name)}, is {_said(new, name)}" for name in changed]
        raise UserError(
            f"{origin}: this run was begun with other settings, which say what it is:\n"
            + "\n".join(lines)
            + "\nset them back to go on with it, or start anew under another name (or with --from)"
        )


_NONE = object()


def _said(values: Mapping[str, Any], name: str) -> str:
    return repr(values[name]) if name in values else "not there"


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested data as dotted names. Tuples count as lists, which is what JSON makes of them."""
    if isinstance(values, tuple):
        values = list(values)
    if isinstance(values, list) and any(isinstance(value, Mapping | list | tuple) for value in values):
        values = {str(place): value for place, value in enumerate(values)}
    if not isinstance(values, Mapping) or not values:
        return {prefix: values}
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}.{name}" if prefix else name)
    return flat

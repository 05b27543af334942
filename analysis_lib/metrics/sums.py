"""Sums of a metric: by key, and for each key one per jackknife group, in float64."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from analysis_lib.capture import Owners

# Group of the sums that are kept over all groups at once.
WHOLE = -1
OF_ALL = Owners([WHOLE])
# Largest number of values of a key that are stacked with those of other keys: on a processor, more
# would leave its cache.
LARGEST_STACKED, LARGEST_STACKED_ON_GPU = 2**12, 2**16
# Number of bytes held from which on values do not wait for the end of the batch.
MOST_WAITING = 2**26
# Largest tensor that is kept because a value that waits is a part of it: in multiples of the value,
# or in bytes.
LARGEST_HELD, MOST_HELD = 32, 2**22

Key = tuple[str | int, ...]
# Numbers of jackknife groups.
Groups = tuple[int, ...]


class GroupSums(NamedTuple):
    """A sum over the utterances of some jackknife groups, one per group, in float64.

    Attributes:
        groups: the groups that have utterances so far, or ``WHOLE`` alone.
        values: the sums, of shape group x ..., a tensor on the device that summed them, or an
            array.
    """

    groups: Groups
    values: Tensor | np.ndarray

    def of(self, groups: Groups) -> list[np.ndarray]:
        """The sums of some groups; groups without a sum are skipped."""
        sums = []
        for group in groups:
            if group in self.groups:
                index = self.groups.index(group)
                sums.append(self.values[index, ...])
        return sums


class Sums(Mapping[Key, GroupSums]):
    """Sums by key, to which the values of a batch are added together.

    A batch adds a few small values per layer, and on a GPU each operation costs more than its
    arithmetic. So values wait, and those of one shape are stacked and added at once, by
    :meth:`settle` or when the sums are read.
    """

    def __init__(self, sums: Mapping[Key, GroupSums] | None = None) -> None:
        # The block of each key; None until values have been added.
        self._block_of: dict[Key, _Block | None] = {}
        self._blocks: dict[tuple, _Block] = {}
        self._waiting: dict[tuple, _Waiting] = {}
        # The memory that waiting values hold: where it lies, and its bytes.
        self._held: set[int] = set()
        self._bytes = 0
        for key, (groups, values) in (sums or {}).items():
            of_key = torch.as_tensor(values)
            of_key = of_key.unsqueeze(1)
            self._block_of[key] = _Block({key: 0}, groups, of_key)

    def add(
        self,
        key: Key,
        values: Tensor | Sequence[Tensor],
        owners: Owners,
        of: Callable[..., Tensor] | None = None,
    ) -> None:
        """Add values, whose first axis is that of ``owners``, to the sums of their groups.

        Args:
            values: one tensor, or the arguments of ``of``.
            of: gives the values to be summed, entry x key x ..., from tensors of shape entry x key
                x ....
        """
        values = [values] if isinstance(values, Tensor) else values
        alike = (of, *((part.shape[1:], part.dtype, part.device) for part in values))
        first = values[0]
        largest = LARGEST_STACKED_ON_GPU
        if first.device.type == "cpu":
            largest = LARGEST_STACKED
        if first[0].numel() > largest:
            alike += (key,)
        # Layers that read other tokens have owners of their own, with the same groups.
        waiting = self._waiting.setdefault((owners.groups, alike), _Waiting(owners))
        if key in waiting.keys:
            self.settle()
            self.add(key, values, owners, of)
            return
        self._block_of.setdefault(key)
        waiting.keys.append(key)
        alone = [_alone(part) for part in values]
        waiting.values.append(alone)
        for part in alone:
            storage = part.untyped_storage()
            if storage.data_ptr() not in self._held:
                self._held.add(storage.data_ptr())
                self._bytes += storage.nbytes()
        if self._bytes > MOST_WAITING:
            self.settle()

    def settle(self) -> None:
        """Add the values that wait."""
        # The sums outlive the forward pass, which runs in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            for (_, alike), waiting in self._waiting.items():
                of, *_ = alike
                owners = waiting.owners
                values = [torch.stack(parts, 1) for parts in zip(*waiting.values, strict=True)]
                values = of(*values) if of else values[0]
                blocks = [self._block(key, alike, values, owners) for key in waiting.keys]
                for block in dict.fromkeys(blocks):
                    of_block = [index for index, other in enumerate(blocks) if other is block]
                    keys = [waiting.keys[index] for index in of_block]
                    some = values
                    if len(of_block) < len(blocks):
                        some = values[:, of_block]
                    block.add(keys, some, owners)
        self._waiting = {}
        self._held = set()
        self._bytes = 0

    def _block(self, key: Key, alike: tuple, values: Tensor, owners: Owners) -> "_Block":
        if self._block_of[key] is None:
            is_whole = owners.groups == (WHOLE,)
            # Sums over all groups are in main memory: a GPU may have no room for them.
            device = torch.device("cpu") if is_whole else values.device
            name = (alike, values.shape[2:], is_whole)
            if name not in self._blocks:
                shape = 0, 0, *values.shape[2:]
                zeros = torch.zeros(shape, dtype=torch.float64, device=device)
                self._blocks[name] = _Block({}, (), zeros)
            self._block_of[key] = self._blocks[name]
        return self._block_of[key]

    def arrays(self) -> dict[Key, GroupSums]:
        """The sums as arrays in main memory, their groups in order.

        They are laid out as they are when they are read from a file: the order of a sum over them
        depends on it. Large sums are not copied, so that they change with what is added later.
        """
        self.settle()
        in_memory = {}
        arrays = {}
        for key, block in self._block_of.items():
            if block not in in_memory:
                block.sort()
                in_memory[block] = block.values.cpu().numpy()
            values = in_memory[block][:, block.places[key]]
            arrays[key] = GroupSums(block.groups, np.ascontiguousarray(values))
        return arrays

    def __getitem__(self, key: Key) -> GroupSums:
        self.settle()
        block = self._block_of[key]
        return GroupSums(block.groups, block.values[:, block.places[key]])

    def __iter__(self) -> Iterator[Key]:
        return iter(self._block_of)

    def __len__(self) -> int:
        return len(self._block_of)


class Maxima(Mapping[Key, GroupSums]):
    """Largest values by key, over all groups at once; what is added or merged changes them.

    It takes the part of :class:`Sums` in a metric whose values are maxima. A NaN stays.
    """

    def __init__(self, maxima: Mapping[Key, GroupSums] | None = None) -> None:
        self._largest: dict[Key, Tensor] = {}
        for key, (_, values) in (maxima or {}).items():
            self._largest[key] = torch.as_tensor(values)[0]

    def add(self, key: Key, values: Tensor, *_: object) -> None:
        """Keep the largest of the values, over their first axis, and of those added before."""
        with torch.inference_mode(False), torch.no_grad():
            largest = values.double().amax(0)
            if key in self._largest:
                largest = torch.maximum(self._largest[key], largest)
            self._largest[key] = largest

    def settle(self) -> None:
        """Nothing waits."""

    def arrays(self) -> dict[Key, GroupSums]:
        """The values as arrays in main memory."""
        arrays = {}
        for key in self:
            groups, values = self[key]
            arrays[key] = GroupSums(groups, values.cpu().numpy())
        return arrays

    def __getitem__(self, key: Key) -> GroupSums:
        return GroupSums((WHOLE,), self._largest[key].unsqueeze(0))

    def __iter__(self) -> Iterator[Key]:
        return iter(self._largest)

    def __len__(self) -> int:
        return len(self._largest)


def _alone(values: Tensor) -> Tensor:
    """The values themselves, or a copy if they are a small part of a large tensor.

    Such a part, as the vectors of one token, would keep all of it in memory until the batch ends.
    """
    held = values.untyped_storage().nbytes()
    if held > max(MOST_HELD, LARGEST_HELD * values.nbytes):
        return values.clone()
    return values


@dataclass
class _Waiting:
    owners: Owners
    keys: list[Key] = field(default_factory=list)
    values: list[Sequence[Tensor]] = field(default_factory=list)


@dataclass(eq=False)
class _Block:
    """The sums of keys whose values have one shape.

    Attributes:
        places: the index of each key on the second axis of ``values``.
        values: the sums, of shape group x key x ....
    """

    places: dict[Key, int]
    groups: Groups
    values: Tensor

    def add(self, keys: list[Key], values: Tensor, owners: Owners) -> None:
        """Add values, of shape entry x key x ..., to the sums of the groups of the entries."""
        self._grow(keys, owners)
        values = values.to(self.values)
        places = [self.places[key] for key in keys]
        if len(places) == len(self.places):
            if places != sorted(places):
                values = values[:, np.argsort(places)]
            owners.add_to(self.values, self.groups, values)
            return
        some = torch.tensor(places).to(values.device)
        sums = self.values[:, some]
        owners.add_to(sums, self.groups, values)
        self.values[:, some] = sums

    def sort(self) -> None:
        """Put the groups in order."""
        order = np.argsort(self.groups)
        if (np.diff(order) < 0).any():
            self.values = self.values[order]
            self.groups = tuple(sorted(self.groups))

    def _grow(self, keys: list[Key], owners: Owners) -> None:
        """Make room for keys and groups that are new."""
        new = [key for key in keys if key not in self.places]
        more = owners.not_in(self.groups)
        if not new and not more:
            return
        for key in new:
            self.places[key] = len(self.places)
        groups, keys, *rest = self.values.shape
        larger = self.values.new_zeros(groups + len(more), len(self.places), *rest)
        larger[:groups, :keys] = self.values
        self.groups += more
        self.values = larger

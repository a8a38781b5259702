"""Which block of a pool has which keys: the host's side of a `BlockCache`, which touches no device.

A sequence has a `BlockTable`: its keys j lie in block `blocks[j // size]`. Several tables may have
one block, which is written no more. Full blocks are known by their tokens and by those before them,
so a sequence that begins with the same tokens takes them over instead of computing them. A block
that nobody has, and that is known, is kept until its memory is needed, the longest unused first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from centella.errors import KVCacheFullError, ShapeError
from centella.tensors.arguments import whole

BLOCK = 64  # keys of a block
SCRATCH = 0  # the block that no sequence has: what is written there is dropped

Known = tuple[int, tuple[int, ...]]  # the number of what is before a block, and its tokens


class Blocks:
    """The blocks of a pool: which are free, which are used and how often, which are known.

    Args:
        count: blocks, the scratch block among them.
        size: keys of a block.
    """

    def __init__(self, count: int, size: int = BLOCK) -> None:
        self.count: int = whole("Blocks", "count", count, 2)
        self.size: int = whole("Blocks", "size", size, 1)
        self._free = list(range(count - 1, SCRATCH, -1))
        self._uses = [0] * count
        self._numbers: dict[Known, tuple[int, int]] = {}  # the number of a content, and its block
        self._known: dict[int, Known] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()  # of the known ones
        self._contents = 0  # that were known so far

    def __repr__(self) -> str:
        return f"Blocks({self.count} of {self.size} keys, {self.free} free)"

    @property
    def free(self) -> int:
        """Blocks that can be taken, those included that are known and that nobody has."""
        return len(self._free) + len(self._unused)

    def need(self, count: int) -> None:
        """Refuse what there is no room for.

        Raises:
            KVCacheFullError: fewer blocks are free.
        """
        if count > self.free:
            raise KVCacheFullError(
                f"BlockCache: expected {count:,} free blocks of {self.size} keys, got "
                f"{self.free:,} of {self.count - 1:,}"
            )

    def take(self) -> int:
        """A block of one's own.

        Raises:
            KVCacheFullError: there is none.
        """
        self.need(1)
        if not self._free:
            oldest = next(iter(self._unused))
            self.forget(oldest)
        block = self._free.pop()
        self._uses[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more has a block."""
        self._unused.pop(block, None)
        self._uses[block] += 1

    def release(self, block: int) -> None:
        """One less has a block."""
        self._uses[block] -= 1
        if self._uses[block]:
            return
        if block in self._known:
            self._unused[block] = None
        else:
            self._free.append(block)

    def shared(self, block: int) -> bool:
        """Whether several have it."""
        return self._uses[block] > 1

    def find(self, before: int, tokens: Sequence[int]) -> tuple[int, int] | None:
        """Number and block of some tokens after others; None: nobody knows them."""
        return self._numbers.get((before, tuple(tokens)))

    def know(self, block: int, before: int, tokens: Sequence[int]) -> int:
        """Note what a full block has; the number of that content.

        Where another block is known to have the same, that one stays known, and this one is not.
        """
        key = (before, tuple(tokens))
        if key not in self._numbers:
            self._contents += 1
            self._numbers[key] = self._contents, block
            self._known[block] = key
        return self._numbers[key][0]

    def forget(self, block: int) -> None:
        """Its content is about to change."""
        key = self._known.pop(block, None)
        if key is not None:
            del self._numbers[key]
        if block in self._unused:
            del self._unused[block]
            self._free.append(block)

    def forget_all(self) -> None:
        """What is known holds no more, of another model."""
        for block in list(self._known):
            self.forget(block)


class BlockTable:
    """The blocks of one sequence.

    Args:
        pool: that they are taken from.
        kind: sequences of one kind share blocks, an attribute too.

    Attributes:
        blocks: key j is in `blocks[j // size]`.
        tokens: the tokens whose keys are there; there may be room for more.
    """

    def __init__(self, pool: Blocks, kind: int = 0) -> None:
        self.kind: int = kind
        self.blocks: list[int] = []
        self.tokens: list[int] = []
        self._pool = pool
        self._contents: list[int] = []  # numbers of the full blocks that were noted

    def __repr__(self) -> str:
        return f"BlockTable({len(self.tokens)} tokens in {len(self.blocks)} blocks)"

    def reuse(self, tokens: Sequence[int]) -> int:
        """Take over the blocks of other sequences that begin so; how many tokens they have.

        Args:
            tokens: of which the keys are needed; only full blocks are shared.
        """
        assert not self.blocks, "an empty table"
        size = self._pool.size
        for start in range(0, len(tokens) - size + 1, size):
            part = tokens[start : start + size]
            known = self._pool.find(self._last, part)
            if known is None:
                break
            number, block = known
            self._pool.share(block)
            self.blocks.append(block)
            self._contents.append(number)
            self.tokens += part
        return len(self.tokens)

    @property
    def _last(self) -> int:
        return self._contents[-1] if self._contents else -self.kind  # contents count from 1

    def missing(self, start: int, end: int) -> int:
        """Blocks that `reserve` would take."""
        return len(self._shared(start, end)) + max(0, self._number(end) - len(self.blocks))

    def _number(self, length: int) -> int:
        return -(-length // self._pool.size)

    def _shared(self, start: int, end: int) -> list[int]:
        """Places in the table whose blocks others have, too, and that are to be written."""
        places = range(start // self._pool.size, min(len(self.blocks), self._number(end)))
        return [i for i in places if self._pool.shared(self.blocks[i])]

    def reserve(self, start: int, end: int) -> list[tuple[int, int]]:
        """Make the places of keys `start` to `end` (without it) this sequence's own.

        When it raises, everything is as it was.

        Returns:
            Blocks to copy before these places are written: from, to.

        Raises:
            KVCacheFullError: there are not enough free blocks.
        """
        pool, shared = self._pool, self._shared(start, end)
        pool.need(self.missing(start, end))
        copies = []
        for index in shared:
            copies.append((self.blocks[index], pool.take()))
            pool.release(self.blocks[index])
            self.blocks[index] = copies[-1][1]
        for block in self.blocks[start // pool.size : self._number(end)]:
            pool.forget(block)
        del self._contents[start // pool.size :]
        while len(self.blocks) < self._number(end):
            self.blocks.append(pool.take())
        return copies

    def add(self, tokens: Sequence[int]) -> None:
        """Note tokens whose keys have been written; full blocks become known.

        Raises:
            ShapeError: their places are not reserved.
        """
        size = self._pool.size
        if self._number(len(self.tokens) + len(tokens)) > len(self.blocks):
            raise ShapeError(
                f"BlockTable: expected up to {len(self.blocks) * size - len(self.tokens)} tokens "
                f"more, got {len(tokens)}; reserve their places first"
            )
        self.tokens += tokens
        for index in range(len(self._contents), len(self.tokens) // size):
            part = self.tokens[index * size : (index + 1) * size]
            self._contents.append(self._pool.know(self.blocks[index], self._last, part))

    def fork(self) -> BlockTable:
        """Another sequence with the same past: the blocks are shared."""
        other = BlockTable(self._pool, self.kind)
        other.blocks, other.tokens = list(self.blocks), list(self.tokens)
        other._contents = list(self._contents)
        for block in self.blocks:
            self._pool.share(block)
        return other

    def truncate(self, length: int) -> None:
        """Forget the tokens after a length, and the places reserved for more.

        Raises:
            ShapeError: there are fewer tokens.
        """
        if not 0 <= length <= len(self.tokens):
            raise ShapeError(f"truncate: expected 0 to {len(self.tokens)} tokens, got {length}")
        kept = self._number(length)
        for block in reversed(self.blocks[kept:]):  # what others are built on stays longest
            self._pool.release(block)
        del self.blocks[kept:], self.tokens[length:]
        del self._contents[length // self._pool.size :]

    def release(self) -> None:
        """Give all blocks back; known ones may be found again."""
        self.truncate(0)

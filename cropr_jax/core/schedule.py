"""Pruning schedules: where tokens are removed, and how many.

A schedule is a tuple of Python ints, fixed before tracing: every shape in the network follows from
it. Blocks count from 1, as in the paper. Sites are fixed by block, whatever the rate: a site that
removes nothing keeps its parameters and its auxiliary loss, so that all stages of a curriculum
share one parameter tree.

The rule of the paper (section "Pruning schedule"): the first site removes p tokens more, one for
each prefix token, so that the totals stay multiples of 8 where the patch grid and R are.
"""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Hashable sequence of (block, tokens removed after it).

    Attributes:
      depth: number L of blocks of the network.
      sites: ((block, removed), ...) with strictly increasing blocks in 1..L.

    Raises:
      ValueError: if a block is out of range or out of order, or a count is negative.
    """

    depth: int
    sites: tuple[tuple[int, int], ...] = ()

    def __post_init__(self):
        previous = 0
        for block, removed in self.sites:
            if not previous < block <= self.depth:
                raise ValueError(
                    f"schedule: block {block} after block {previous}; blocks must increase "
                    f"within 1..{self.depth}"
                )
            if removed < 0:
                raise ValueError(f"schedule: cannot remove {removed} tokens after block {block}")
            previous = block

    @property
    def blocks(self) -> tuple[int, ...]:
        """The block of each site."""
        return tuple(block for block, _ in self.sites)

    @property
    def removed(self) -> int:
        """Tokens removed by all sites together."""
        return sum(removed for _, removed in self.sites)

    def patches(self, m: int) -> tuple[int, ...]:
        """Patch tokens left after each site, of `m` at the start.

        Raises:
          ValueError: naming the first block after which no patch token would be left.
        """
        left = []
        for block, removed in self.sites:
            if removed >= m:
                raise ValueError(
                    f"schedule: after block {block} {removed} of {m} patch tokens would be "
                    f"removed, at least one must stay; lower the pruning rate"
                )
            m -= removed
            left.append(m)
        return tuple(left)

    def tokens(self, m: int, prefix: int) -> tuple[int, ...]:
        """Tokens left after each site, prefix tokens counted."""
        return tuple(prefix + left for left in self.patches(m))

    def block_inputs(self, m: int, prefix: int, fusion: bool) -> tuple[int, ...]:
        """Tokens that enter each block, prefix tokens counted.

        Args:
          m: patch tokens at the start.
          prefix: prefix tokens.
          fusion: whether Last Layer Fusion gives the last block all tokens.
        """
        left = dict(zip(self.blocks, self.tokens(m, prefix), strict=True))
        inputs = [m + prefix]
        for block in range(1, self.depth):
            inputs.append(left.get(block, inputs[-1]))
        if fusion:
            inputs[-1] = m + prefix
        return tuple(inputs)

    def tpr(self, m: int) -> float:
        """Total pruning ratio: the share of `m` patch tokens that is removed by the end."""
        return 1 - (self.patches(m) or (m,))[-1] / m


def last_site(depth: int, fusion: bool) -> int:
    """The last block after which pruning helps: L-1, or L-2 when block L sees all tokens again."""
    return depth - (2 if fusion else 1)


def per_block(depth: int, rate: int, *, prefix: int, fusion: bool) -> Schedule:
    """Removes `rate` tokens (R) after every block but the last, or the last two with LLF."""
    return at_blocks(depth, range(1, last_site(depth, fusion) + 1), rate, prefix=prefix)


def three_stage(depth: int, rate: int, *, prefix: int, fusion: bool) -> Schedule:
    """Removes `rate` tokens after a quarter, half and three quarters of the blocks.

    Of 24 blocks these are the 6th, 12th and 18th (Table "cls_cmp", R = 50), of 12 the 3rd, 6th and
    9th.

    Raises:
      ValueError: if the depth is no multiple of 4, or the third stage is no site (see `last_site`).
    """
    if depth % 4:
        raise ValueError(f"schedule 'three_stage' needs a depth divisible by 4, found {depth}")
    blocks = tuple(depth * stage // 4 for stage in (1, 2, 3))
    if blocks[-1] > last_site(depth, fusion):
        raise ValueError(
            f"schedule 'three_stage': with LLF nothing can be pruned after block {blocks[-1]} "
            f"of {depth}"
        )
    return at_blocks(depth, blocks, rate, prefix=prefix)


def aggressive(depth: int, removed: int, block: int = 3) -> Schedule:
    """Removes `removed` tokens once, after the 3rd block; nothing is added for the prefix.

    The paper removes 825 of EVA-02-L's 1,024 patches (Table "imagenet_sota").
    """
    return Schedule(depth, ((block, removed),))


def at_blocks(depth: int, blocks: Sequence[int], rate: int, *, prefix: int) -> Schedule:
    """Removes `rate` tokens after each of `blocks`, p more after the first if the rate is not 0."""
    sites = [(block, rate) for block in blocks]
    if rate and sites:
        sites[0] = (sites[0][0], rate + prefix)
    return Schedule(depth, tuple(sites))


def to_counts(depth: int, m: int, blocks: Sequence[int], counts: Sequence[int]) -> Schedule:
    """Leaves `counts` patch tokens after `blocks`, of `m` at the start (detection).

    Raises:
      ValueError: if a count is larger than the one before, or the two lengths differ.
    """
    if len(blocks) != len(counts):
        raise ValueError(f"schedule: {len(blocks)} blocks but {len(counts)} token counts")
    before = (m, *counts[:-1])
    removed = (old - new for old, new in zip(before, counts, strict=True))
    return Schedule(depth, tuple(zip(blocks, removed, strict=True)))

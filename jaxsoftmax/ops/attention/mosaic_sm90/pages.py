"""Keys and values in pages, which the forward kernel copies from where the page table says."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Pages:
    """Pages of keys and values, `[*batch, count, size, heads, head size]`.

    Attributes:
      size: keys of a page, a power of two.
      count: number of pages of a batch entry.
    """

    size: int
    count: int

    def of_block(self, block_kv: int) -> int:
        """Returns the number of pages that a key block has keys of: 1 if a page has several key blocks."""
        return max(1, block_kv // self.size)

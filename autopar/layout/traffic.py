"""How many bytes one rank hands to the transport for one collective. One formula for prediction, count and test."""

from __future__ import annotations

#: an all-reduce of at most this many bytes sends its whole tensor to every peer (one round instead of two).
SMALL_ALL_REDUCE = 4096


def chunk(numel: int, parts: int, index: int) -> tuple[int, int]:
    """Start and length of piece ``index`` when ``numel`` elements are cut in ``parts`` ceil chunks (as torch.chunk)."""
    size = -(-numel // parts)
    start = min(index * size, numel)
    return start, min(size, numel - start)


def bytes_sent(kind: str, numel: int, itemsize: int, ranks: int, index: int = 0) -> int:
    """Bytes that the rank at ``index`` of a group of ``ranks`` sends.

    Args:
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``shift`` or ``mirror``.
        numel: elements of this rank's **input** tensor.
        itemsize: bytes of one element.

    An all-reduce is a reduce-scatter of ceil chunks followed by an all-gather of them.
    """
    if ranks == 1 or numel == 0:
        return 0
    if kind == "shift":
        return numel * itemsize
    if kind == "mirror":
        return numel // 2 * itemsize if 2 * index != ranks - 1 else 0
    if kind == "all_gather":
        return (ranks - 1) * numel * itemsize
    if kind == "all_reduce":
        if numel * itemsize <= SMALL_ALL_REDUCE:
            return (ranks - 1) * numel * itemsize
        own = chunk(numel, ranks, index)[1]
        return (numel - own + (ranks - 1) * own) * itemsize
    if kind in ("reduce_scatter", "all_to_all"):
        return (numel - chunk(numel, ranks, index)[1]) * itemsize
    raise ValueError(f"no such collective: {kind}")

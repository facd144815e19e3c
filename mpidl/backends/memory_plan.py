"""Place the arrays of a training step in one piece of memory, given when each array is needed."""

import bisect


def place(buffers):
    """Return an offset for each buffer, and the number of bytes that the buffers need together.

    A buffer is (bytes, first time, last time at which it is needed). Buffers that are needed at
    different times may share memory. The algorithm is greedy by size (Pisarchyk and Lee, "Efficient
    memory management for deep neural net inference", 2020, section 5.3): from the largest to the
    smallest, each buffer gets the lowest offset at which it overlaps no buffer that is needed at
    the same time.
    """
    order = sorted(range(len(buffers)), key=lambda i: (-buffers[i][0], buffers[i][1]))
    offsets, placed, nbytes = [0] * len(buffers), [], 0
    for i in order:
        size, first, last = buffers[i]
        offset = 0
        for start, stop, other_first, other_last in placed:
            if first <= other_last and other_first <= last:
                if start - offset >= size:
                    break
                offset = max(offset, stop)
        offsets[i] = offset
        bisect.insort(placed, (offset, offset + size, first, last))
        nbytes = max(nbytes, offset + size)
    return offsets, nbytes

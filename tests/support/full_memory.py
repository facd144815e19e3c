"""Leave few zeros in the memory of this process. A test imports this module before MPI_Init.

During MPI_Init, MPICH also sends the memory that follows its address, and abbreviates zeros. After
the import, memory without zeros follows each free block.
"""

import ctypes

FILLED = 4096  # bytes after each free block; not less than MPICH sends
LARGEST_FREE_BLOCK = 3072
BLOCKS_PER_SIZE = 4

c = ctypes.CDLL(None)
c.malloc.argtypes, c.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
c.free.argtypes, c.free.restype = [ctypes.c_void_p], None

free_blocks = []
for size in range(16, LARGEST_FREE_BLOCK, 16):
    for _ in range(BLOCKS_PER_SIZE):
        free_blocks.append(c.malloc(size))
        ctypes.memset(c.malloc(FILLED), 0xA5, FILLED)
for block in free_blocks:
    c.free(block)

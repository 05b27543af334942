"""Memory that was freed: when a program keeps it for what comes next, and when it goes back to the system."""

import ctypes

# As glibc numbers them; other C libraries have no such functions, and no such habits.
_M_TOP_PAD, _M_MMAP_THRESHOLD = -2, -3
# glibc's largest heap of a thread, and the largest block that may lie in one.
_HEAP, _LARGEST_IN_HEAP = 2**26, 2**25

_C = ctypes.CDLL(None)
_GLIBC = hasattr(_C, "malloc_trim") and hasattr(_C, "mallopt")


def keep_freed_memory() -> None:
    """From now on, let the threads of this process keep a heap in which nothing is left.

    The memory of a thread lies in heaps of 64 MiB, and glibc would unmap the last of them as soon as it is empty. Where
    sums and activations fill a heap, every block of a model would begin another, whose pages the system makes and
    zeroes, and lose it again: for SmolLM2, 3 % of the time.
    """
    if _GLIBC:
        # Either setting alone would stop glibc from raising the other.
        _C.mallopt(_M_MMAP_THRESHOLD, _LARGEST_IN_HEAP)
        _C.mallopt(_M_TOP_PAD, _HEAP)


def release_freed_memory() -> None:
    """Give freed memory back to the system.

    Every batch has another shape, and what is kept of each, such as a primitive that oneDNN made for the shape, lies
    between the pieces that are freed. glibc can neither join nor return them: without this, a process grows by a third
    over ten thousand sentences.
    """
    if _GLIBC:
        _C.malloc_trim(0)

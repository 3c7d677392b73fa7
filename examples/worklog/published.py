"""What others published, with the GPU that they name: never measured here, and in columns of its own in every table."""

from typing import NamedTuple

PAPER = "arXiv:1805.02867"
PAPERS_GPU = "Tesla V100"
PAPERS_RUNGS = {"naive": "naive", "fused": "safe", "online_wide": "online"}
PAPERS_ACCESSES = {"safe": "4", "online": "3"}  # an element
PAPERS_SPEED_UP = {"online": "up to 1.3x"}  # over safe
# Softmax with top-k: accesses, which for safe softmax fused with it are the reads of the paper's benchmark, and the speed-up.
PAPERS_TOP_K = {"safe_then_top_k": ("5", "the base"), "safe_top_k": ("2", "-"), "online_top_k": ("1", "up to 5x")}

# Maharshi Pandya's worklog: its second kernel and PyTorch as its text gives them, its last kernel as its plot does; ms.
ROWS_GPU = "GTX 1050 Ti"
ROWS = {"online_thread": 88.15, "online_wide": 4.11, "torch": 7.226}

# Somik's worklog, one vector of 16M float32: the kernel and its ms, beside the rung that is nearest to it.
VECTOR_GPU = "RTX 3060 class, 336 GB/s"
VECTOR = {
    "fused": ("kernel 1, one block", 89.41),
    "tree": ("kernel 2, several launches", 5.52),
    "online_blocks": ("kernel 3, hierarchical (m, d)", 1.88),
    "torch": ("PyTorch", 5.34),
    "cudnn": ("cuDNN, accurate", 30.87),
}

# Benji's worklog, float16, a thread a row: ms of naive (5N), fused (3N) and online ("2N", which counts its two reads as one).
HALVES_GPU = "Tesla T4"
HALVES = {
    (32, 512): (0.1324, 0.0776, 0.0682, "1.94x"),
    (32, 1024): (0.2670, 0.1623, 0.1408, "1.90x"),
    (32, 2048): (0.5335, 0.3368, 0.2845, "1.88x"),
    (32, 4096): (1.0633, 0.6715, 0.5666, "1.88x"),
    (32, 8192): (2.0770, 1.3246, 1.1147, "1.86x"),
    (64, 512): (0.2007, 0.1234, 0.1024, "1.96x"),
    (64, 1024): (0.3986, 0.2468, 0.2033, "1.96x"),
    (64, 2048): (0.7899, 0.4933, 0.4007, "1.97x"),
    (64, 4096): (1.5726, 0.9834, 0.8058, "1.95x"),
    (64, 8192): (3.1366, 1.9745, 1.6136, "1.94x"),
}


class Metric(NamedTuple):
    """A line of the guide's table."""

    naive: str
    optimised: str
    improvement: str


# A guide to softmax optimisation, which does not name its GPU; its naive kernel makes three passes.
GUIDE_GPU = "a GPU that is not named"
GUIDE = {
    "throughput, GB/s": Metric("180", "720", "4x"),
    "latency, us": Metric("45", "12", "3.8x"),
    "memory reads": Metric("3N", "2N", "33% fewer"),
}

# LeetArxiv's online normalizer, 1024 x 512, in C and in CUDA: how many times as fast its GPU code is.
CORE_GPU = "a GPU that is not named"
CORE = {"online": "70x"}

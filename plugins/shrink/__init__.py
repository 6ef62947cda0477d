"""Small models with random weights that keep the architecture and the vocabulary of a large one.

The plug-in `rehearsal` loads it by kind. config.json is enough: the weights of the large model are not read.
"""

PROVIDES = {"small model": {"shrink": "folder:shrunk_model", "head size of kernels": "sizes:HEAD_SIZE_OF_KERNELS"}}

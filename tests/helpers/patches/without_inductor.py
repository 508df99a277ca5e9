"""torch.compile with the same graphs, without the C++ code of Inductor, which takes a minute and
more. test_training.py compiles with Inductor.
"""

import functools

import torch

torch.compile = functools.partial(torch.compile, backend="aot_eager")

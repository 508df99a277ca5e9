"""Tells how many graphs torch.compile has made, and the bytes of the parameters of the largest."""

import atexit

import torch
import torch._dynamo
from helpers.patches import print

sizes = []
compile = torch.compile


def count(graph, example_inputs):
    sizes.append(sum(x.nbytes for x in example_inputs if isinstance(x, torch.nn.Parameter)))
    return graph.forward


torch.compile = lambda function: compile(function, backend=count)
atexit.register(lambda: print("\ngraphs", len(sizes), "largest", max(sizes)))

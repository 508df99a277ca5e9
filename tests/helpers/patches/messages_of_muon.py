"""Each rank tells its messages of each update, and how many matrices it has made orthogonal."""

import torch
import torch.distributed as dist
from helpers.patches import at_end, in_place_of, print

messages, products = [], []


@in_place_of(dist, "all_to_all_single")
def all_to_all_single(original, output, input, *sizes):
    messages.append((str(input.dtype), input.numel(), output.numel()))
    return original(output, input, *sizes)


@in_place_of(torch, "addmm")
def addmm(original_addmm, *args, **options):
    products.append(args[0].dtype)
    return original_addmm(*args, **options)


@at_end
def tell():
    print("\nmessages", *(word for message in messages for word in message))
    print("\nmatrices", len(products) // 10)

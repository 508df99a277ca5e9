"""Each rank tells its messages of each update, and how many matrices it has made orthogonal."""

import torch
import torch.distributed as dist

from helpers.patches import at_end, print

messages, products = [], []


def all_to_all_single(output, input, *sizes):
    messages.append((str(input.dtype), input.numel(), output.numel()))
    return original(output, input, *sizes)


original = dist.all_to_all_single
dist.all_to_all_single = all_to_all_single


def addmm(*args, **options):
    products.append(args[0].dtype)
    return original_addmm(*args, **options)


original_addmm = torch.addmm
torch.addmm = addmm


@at_end
def tell():
    print("\nmessages", *(word for message in messages for word in message))
    print("\nmatrices", len(products) // 10)
